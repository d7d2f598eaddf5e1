"""Builds a run's thinking stage from its configuration: the model that writes and scores thoughts, and the budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from toolwise.advantages import MonitoredEstimator, Rlvcr, build_estimator
from toolwise.config.loader import build_config
from toolwise.config.router import BudgetConfig
from toolwise.config.schema import RunConfig
from toolwise.errors import ConfigError
from toolwise.protocols import AdvantageEstimator, Learner, ModelPolicy, PrefixEngine, Sampling
from toolwise.routing.budget import Multiplier
from toolwise.thinking.alternatives import AlternativeWriter
from toolwise.thinking.levels import DEFAULT_LEVELS, END_THINK, load_levels
from toolwise.thinking.stage import StageSettings, ThinkingStage
from toolwise.thinking.thinking_model import EngineModel, PolicyWithScorer, ThinkingModel
from toolwise.types import CreditedRollout

if TYPE_CHECKING:
    from toolwise.learner.batch import MicroBatchSettings


def build_thinking_stage(
    config: RunConfig, policy: ModelPolicy, micro_batch: MicroBatchSettings
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
        total_steps=config.trainer.total_steps,
        seed=config.seed,
    )
    return ThinkingStage(
        AlternativeWriter(thinking_model(policy, micro_batch), policy.chat, levels, sampling),
        settings,
        _multiplier(config),
    )


def thinking_model(policy: ModelPolicy, micro_batch: MicroBatchSettings) -> ThinkingModel:
    """The policy's engine if it can both generate and score; else the policy with a scoring pass of the learner."""
    if isinstance(policy.engine, PrefixEngine):
        return EngineModel(policy.engine, stop_strings=(END_THINK,))
    from toolwise.learner.continuation_scores import ContinuationScorer

    return PolicyWithScorer(policy, ContinuationScorer(policy.model, micro_batch))


def _multiplier(config: RunConfig) -> Multiplier | None:
    budget = config.algorithm.rlvcr.budget
    if budget.limit is None:
        return None
    settings = {**budget.model_dump(exclude={"price"}), "unit": "tokens", "initial": budget.price}
    return Multiplier(build_config(BudgetConfig, settings, source="algorithm.rlvcr.budget"))


def build_rlvcr(config: RunConfig, trajectory: AdvantageEstimator) -> Rlvcr:
    rlvcr = config.algorithm.rlvcr
    untyped: Any = build_estimator(
        "rlvcr",
        **rlvcr.model_dump(),
        trajectory=trajectory,
        seed=config.seed,
        importance_cap=config.actor.importance_cap,
        compare_equal_scores=rlvcr.steps != "mixed" and rlvcr.share > 0.0,
    )
    estimator: Rlvcr = untyped
    return estimator


def with_rlvcr_metrics(config: RunConfig, estimator: AdvantageEstimator) -> AdvantageEstimator:
    """Add RLVCR's metrics to another estimator, if the thinking stage is enabled."""
    algorithm = config.algorithm
    if not algorithm.rlvcr.enable or algorithm.adv_estimator == "rlvcr":
        return estimator
    return MonitoredEstimator(estimator, build_rlvcr(config, estimator), priced=algorithm.rlvcr.price_rollouts)


def annotate_added_rows(learner: Learner, credited: Sequence[CreditedRollout]) -> list[CreditedRollout]:
    """Annotate the rows that an estimator added: the learner needs annotations for every row it updates on."""
    original_ids = {c.annotated.scored.rollout.rollout_id for c in credited if c.annotated.thinking is not None}
    added = [c for c in credited if c.annotated.scored.rollout.rollout_id not in original_ids]
    if not original_ids or not added:
        return list(credited)
    annotated = iter(learner.annotate([c.annotated.scored for c in added]))
    replaced = {c.rollout.rollout_id: replace(c, annotated=a) for c, a in zip(added, annotated, strict=True)}
    return [replaced.get(c.rollout.rollout_id, c) for c in credited]


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
