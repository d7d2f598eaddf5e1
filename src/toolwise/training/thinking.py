"""Builds a run's thinking stage from its configuration: the model that writes and scores thoughts, and the budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolwise.advantages import MonitoredEstimator, Rlvcr, build_estimator
from toolwise.config.schema import RunConfig
from toolwise.errors import ConfigError
from toolwise.protocols import AdvantageEstimator, Sampling
from toolwise.routing.budget import Budget, Multiplier
from toolwise.thinking.alternatives import AlternativeWriter, Codec
from toolwise.thinking.levels import DEFAULT_LEVELS, END_THINK, load_levels
from toolwise.thinking.stage import StageSettings, ThinkingStage
from toolwise.thinking.thinking_model import EngineModel, PolicyWithScorer, ThinkingModel, require_token_generator

if TYPE_CHECKING:
    from toolwise.learner.batch import MicroBatchSettings


def build_thinking_stage(
    config: RunConfig, policy: Any, model: Any, codec: Codec, micro_batch: MicroBatchSettings
) -> ThinkingStage | None:
    """None if `algorithm.rlvcr.enable` is false."""
    rlvcr = config.algorithm.rlvcr
    if not rlvcr.enable:
        return None
    sampling = Sampling(
        temperature=config.rollout.temperature,
        max_new_tokens=rlvcr.max_thought_tokens,
        do_sample=config.rollout.do_sample,
        seed=config.seed,
    )
    levels = DEFAULT_LEVELS if rlvcr.levels is None else load_levels(rlvcr.levels)
    settings = StageSettings(
        selection=rlvcr.steps,
        share=rlvcr.share,
        max_added_tokens=rlvcr.max_added_tokens or None,
        success_score=rlvcr.success_score,
        price=rlvcr.budget.price,
        charged=rlvcr.price_rollouts,
        total_steps=config.trainer.total_steps,
        seed=config.seed,
    )
    return ThinkingStage(
        AlternativeWriter(thinking_model(policy, model, micro_batch), codec, levels, sampling),
        settings,
        _multiplier(config),
    )


def thinking_model(policy: Any, model: Any, micro_batch: MicroBatchSettings) -> ThinkingModel:
    """The policy's engine if it can both generate and score; else the policy with a scoring pass of the learner."""
    for engine in (policy, getattr(policy, "engine", None)):
        if engine is not None and hasattr(engine, "score") and hasattr(engine, "generate"):
            return EngineModel(engine, stop_strings=(END_THINK,))
    generator = require_token_generator(policy)
    from toolwise.learner.continuation_scores import ContinuationScorer

    return PolicyWithScorer(generator, ContinuationScorer(model, micro_batch))


def _multiplier(config: RunConfig) -> Multiplier | None:
    budget = config.algorithm.rlvcr.budget
    if budget.limit is None:
        return None
    return Multiplier(
        Budget(
            limit=budget.limit,
            unit="tokens",
            initial=budget.price,
            rate=budget.rate,
            proportional=budget.proportional,
            every=budget.every,
            cap=budget.cap,
        )
    )


def with_rlvcr(config: RunConfig, trajectory: AdvantageEstimator) -> AdvantageEstimator:
    """Add the thinking advantage to another estimator's, or only its metrics, as configured."""
    rlvcr = config.algorithm.rlvcr
    if config.algorithm.adv_estimator != "rlvcr" and not rlvcr.enable:
        return trajectory
    return build_estimator(
        Rlvcr if config.algorithm.adv_estimator == "rlvcr" else MonitoredEstimator,
        **rlvcr.model_dump(),
        trajectory=trajectory,
        seed=config.seed,
        importance_cap=config.actor.importance_cap,
        compare_equal_scores=rlvcr.steps != "mixed" and rlvcr.share > 0.0,
    )


def check_thinking(config: RunConfig) -> None:
    """Raise if thinking settings contradict each other."""
    algorithm = config.algorithm
    if algorithm.adv_estimator != "rlvcr":
        return
    if not algorithm.rlvcr.enable:
        raise ConfigError(
            "algorithm.adv_estimator is rlvcr but algorithm.rlvcr.enable is false: no alternatives would be written; "
            f"set enable = true, or adv_estimator = {algorithm.rlvcr.base!r}"
        )
    if algorithm.rlvcr.combine == "reweight" and algorithm.kl == "reward":
        raise ConfigError(
            "algorithm.rlvcr.combine is reweight, whose added rows have no reward to subtract a KL from: use "
            'kl = "loss", or combine = "additive"'
        )
