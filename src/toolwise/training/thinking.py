"""Builds a run's thinking stage from its configuration: the model that writes and scores thoughts, and the budget."""

from __future__ import annotations

from toolwise.advantages import MonitoredEstimator, Rlvcr, build_estimator
from toolwise.config.algorithm import ThinkingBudgetConfig
from toolwise.config.loader import build_config
from toolwise.config.router import BudgetConfig
from toolwise.config.schema import ActorConfig, RunConfig
from toolwise.errors import ConfigError
from toolwise.protocols import AdvantageEstimator, ModelPolicy, PrefixEngine, Sampling
from toolwise.routing.budget import Multiplier
from toolwise.thinking.alternatives import AlternativeWriter
from toolwise.thinking.levels import DEFAULT_LEVELS, END_THINK, load_levels
from toolwise.thinking.stage import ThinkingStage
from toolwise.thinking.thinking_model import EngineModel, PolicyWithScorer, ThinkingModel


def build_thinking_stage(config: RunConfig, policy: ModelPolicy) -> ThinkingStage | None:
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
    return ThinkingStage(
        AlternativeWriter(thinking_model(policy, config.actor), policy.chat, levels, sampling),
        rlvcr,
        _multiplier(rlvcr.budget),
        total_steps=config.trainer.total_steps,
        seed=config.seed,
    )


def thinking_model(policy: ModelPolicy, actor: ActorConfig) -> ThinkingModel:
    """The policy's engine if it can both generate and score; else the policy with a scoring pass of the learner."""
    if isinstance(policy.engine, PrefixEngine):
        return EngineModel(policy.engine, stop_strings=(END_THINK,))
    from toolwise.learner.continuation_scores import ContinuationScorer

    return PolicyWithScorer(policy, ContinuationScorer(policy.model, actor))


def _multiplier(budget: ThinkingBudgetConfig) -> Multiplier | None:
    if budget.limit is None:
        return None
    settings = {**budget.model_dump(exclude={"price"}), "unit": "tokens", "initial": budget.price}
    return Multiplier(build_config(BudgetConfig, settings, source="algorithm.rlvcr.budget"))


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
