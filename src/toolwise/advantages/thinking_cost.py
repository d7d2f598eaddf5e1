"""The cost of thinking: computes advantages from rewards minus λ (from `RolloutThinking`) times the thinking tokens.

A rollout of n steps costs λ · Σ t_i / n, where t_i is the number of thinking tokens of step i. Each step pays its own
part, and the rollout's total falls by their sum: estimators over steps see which step spent tokens, those over scores
see how many were spent. The terminal reward (`step_rewards.py`) and the stored scores and rewards do not change; only
the advantages include the cost.
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
    return [_restore_rewards(result, rollout) for result, rollout in zip(credited, rollouts, strict=True)], metrics


def _subtract_thinking_cost(rollout: AnnotatedRollout, settings: dict[str, Any]) -> AnnotatedRollout:
    """The rollout with a reward on every step, minus the step's share of the cost.

    The score changes by the same total as the steps, so that score − Σ base_reward stays the same; if the score is
    added to the step rewards, only the steps pay.
    """
    thinking, scored = rollout.thinking, rollout.scored
    if thinking is None or not thinking.steps:
        return rollout
    default = settings.get("default_step_reward", 0.0)
    rewards = [default if step.base_reward is None else step.base_reward for step in scored.steps]
    costs = [thinking.price * step.thinking_tokens / len(thinking.steps) for step in thinking.steps]
    steps = tuple(
        _with_base_reward(step, reward - cost) for step, reward, cost in zip(scored.steps, rewards, costs, strict=True)
    )
    score = scored.score
    if settings.get("terminal_score") != "add":
        score += default * sum(step.base_reward is None for step in scored.steps) - sum(costs)
    result = scored.result.model_copy(update={"score": score})
    return replace(rollout, scored=replace(scored, result=result, steps=steps))


def _restore_rewards(credited: CreditedRollout, rollout: AnnotatedRollout) -> CreditedRollout:
    steps = (_with_base_reward(s, old.base_reward) for s, old in zip(credited.steps, rollout.scored.steps, strict=True))
    return replace(credited, annotated=rollout, steps=tuple(steps))


def _with_base_reward(step: StepData, reward: float | None) -> StepData:
    return type(step).unchecked(**{**step.__dict__, "base_reward": reward})
