"""Credit for scores less the price of thought: λ (from the `Deliberation`) times the rollout's thinking tokens a step.

A rollout of n steps costs λ · Σ t_i / n, where t_i are a step's thinking tokens. It comes off the score; and in a group
whose steps tell the score already (`step_rewards.py`: all have rewards of their own, or `terminal_score = "never"`),
each step's reward pays its part, so that estimators that look at steps see who has thought. Credit alone has seen the
price: scores and rewards stay what the world and the reward said.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from toolwise.advantages.credit import credit
from toolwise.protocols import AdvantageEstimator, Metrics
from toolwise.types import AnnotatedRollout, CreditedRollout, StepData


def credit_priced(
    inner: AdvantageEstimator, rollouts: Sequence[AnnotatedRollout]
) -> tuple[list[CreditedRollout], Metrics]:
    how, missing = _setting(inner, "terminal_score", "auto"), _setting(inner, "default_step_reward", 0.0)
    told: dict[str, bool] = defaultdict(lambda: how != "always")
    for rollout in rollouts:
        whole = all(step.base_reward is not None for step in rollout.scored.steps)
        told[rollout.scored.rollout.group_id] &= whole or how == "never"
    paid = [_less_thinking(r, missing if told[r.scored.rollout.group_id] else None) for r in rollouts]
    credited, metrics = credit(inner, paid)
    return [_as_earned(found, rollout) for found, rollout in zip(credited, rollouts, strict=True)], metrics


def _setting(estimator: Any, name: str, default: Any) -> Any:
    """Its own, or that of the one it holds."""
    while not hasattr(estimator, name) and hasattr(estimator, "inner"):
        estimator = estimator.inner
    return getattr(estimator, name, default)


def _less_thinking(rollout: AnnotatedRollout, missing: float | None) -> AnnotatedRollout:
    """`missing` is what a step without a reward has earned; None: the score alone pays."""
    thinking, scored = rollout.thinking, rollout.scored
    if thinking is None or not thinking.steps:
        return rollout
    spent, count, steps = [step.thinking_tokens for step in thinking.steps], len(thinking.steps), scored.steps
    result = scored.result.model_copy(update={"score": scored.score - thinking.price * sum(spent) / count})
    if missing is not None:
        earned = [missing if step.base_reward is None else step.base_reward for step in steps]
        parts = [reward - thinking.price * tokens / count for reward, tokens in zip(earned, spent, strict=True)]
        steps = tuple(_earning(step, reward) for step, reward in zip(steps, parts, strict=True))
    return replace(rollout, scored=replace(scored, result=result, steps=steps))


def _as_earned(found: CreditedRollout, rollout: AnnotatedRollout) -> CreditedRollout:
    steps = (_earning(s, own.base_reward) for s, own in zip(found.steps, rollout.scored.steps, strict=True))
    return replace(found, annotated=rollout, steps=tuple(steps))


def _earning(step: StepData, reward: float | None) -> StepData:
    return type(step).trusted(**{**step.__dict__, "base_reward": reward})
