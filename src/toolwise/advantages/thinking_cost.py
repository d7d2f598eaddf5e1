"""The price of thinking: advantages for rewards less λ (from the `RolloutThinking`) times the thinking tokens.

A rollout of n steps costs λ · Σ t_i / n, where t_i are a step's thinking tokens. Each step pays its own part, and the
rollout's total falls by the sum of them: estimators over steps see who has thought, those over scores how much. What
the last step gets (`step_rewards.py`) does not change, and neither do stored scores and rewards: only advantages have
seen the price.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from toolwise.advantages.assign import credit
from toolwise.advantages.step_rewards import reward_settings
from toolwise.protocols import AdvantageEstimator, Metrics
from toolwise.types import AnnotatedRollout, CreditedRollout, StepData


def credit_with_thinking_cost(
    inner: AdvantageEstimator, rollouts: Sequence[AnnotatedRollout]
) -> tuple[list[CreditedRollout], Metrics]:
    credited, metrics = credit(
        inner, [_subtract_thinking_cost(rollout, reward_settings(inner)) for rollout in rollouts]
    )
    return [_restore_rewards(found, rollout) for found, rollout in zip(credited, rollouts, strict=True)], metrics


def _subtract_thinking_cost(rollout: AnnotatedRollout, settings: dict[str, Any]) -> AnnotatedRollout:
    """The rollout with a reward on every step, less its part of the price.

    The score changes by as much as all the steps do, so that score − Σ base_reward stays what it was; where the score
    is added to the step rewards, the steps alone have paid.
    """
    thinking, scored = rollout.thinking, rollout.scored
    if thinking is None or not thinking.steps:
        return rollout
    default = settings.get("default_step_reward", 0.0)
    earned = [default if step.base_reward is None else step.base_reward for step in scored.steps]
    parts = [thinking.price * step.thinking_tokens / len(thinking.steps) for step in thinking.steps]
    steps = tuple(
        _with_base_reward(step, reward - part) for step, reward, part in zip(scored.steps, earned, parts, strict=True)
    )
    score = scored.score
    if settings.get("terminal_score") != "add":
        score += default * sum(step.base_reward is None for step in scored.steps) - sum(parts)
    result = scored.result.model_copy(update={"score": score})
    return replace(rollout, scored=replace(scored, result=result, steps=steps))


def _restore_rewards(found: CreditedRollout, rollout: AnnotatedRollout) -> CreditedRollout:
    steps = (_with_base_reward(s, own.base_reward) for s, own in zip(found.steps, rollout.scored.steps, strict=True))
    return replace(found, annotated=rollout, steps=tuple(steps))


def _with_base_reward(step: StepData, reward: float | None) -> StepData:
    return type(step).unchecked(**{**step.__dict__, "base_reward": reward})
