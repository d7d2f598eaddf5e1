"""Credit for scores less the price of thought: λ (from the `Deliberation`) times the rollout's thinking tokens a step.

A rollout of n steps costs λ · Σ t_i / n, where t_i are a step's thinking tokens. It comes off the score; and in a group
whose steps all have rewards of their own, which tell the score already (`step_rewards.py`), each step's reward pays its
part, so that estimators that look at steps see who has thought (not with `terminal_score = "always"`, where the score
is told twice). Credit alone has seen the price: scores and rewards stay what the world and the reward said.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from toolwise.advantages.credit import credit
from toolwise.protocols import AdvantageEstimator, Metrics
from toolwise.types import AnnotatedRollout, CreditedRollout, StepData


def credit_priced(
    inner: AdvantageEstimator, rollouts: Sequence[AnnotatedRollout]
) -> tuple[list[CreditedRollout], Metrics]:
    by_steps = getattr(inner, "terminal_score", "auto") != "always"
    told: dict[str, bool] = defaultdict(lambda: by_steps)
    for rollout in rollouts:
        told[rollout.scored.rollout.group_id] &= all(step.base_reward is not None for step in rollout.scored.steps)
    paid = [_less_thinking(rollout, steps_too=told[rollout.scored.rollout.group_id]) for rollout in rollouts]
    credited, metrics = credit(inner, paid)
    return [_as_earned(found, rollout) for found, rollout in zip(credited, rollouts, strict=True)], metrics


def _less_thinking(rollout: AnnotatedRollout, *, steps_too: bool) -> AnnotatedRollout:
    thinking, scored = rollout.thinking, rollout.scored
    if thinking is None or not thinking.steps:
        return rollout
    spent, count, steps = [step.thinking_tokens for step in thinking.steps], len(thinking.steps), scored.steps
    result = scored.result.model_copy(update={"score": scored.score - thinking.price * sum(spent) / count})
    if steps_too:
        paid = zip(steps, spent, strict=True)
        steps = tuple(_earning(s, (s.base_reward or 0.0) - thinking.price * tokens / count) for s, tokens in paid)
    return replace(rollout, scored=replace(scored, result=result, steps=steps))


def _as_earned(found: CreditedRollout, rollout: AnnotatedRollout) -> CreditedRollout:
    steps = (_earning(s, own.base_reward) for s, own in zip(found.steps, rollout.scored.steps, strict=True))
    return replace(found, annotated=rollout, steps=tuple(steps))


def _earning(step: StepData, reward: float | None) -> StepData:
    return type(step).trusted(**{**step.__dict__, "base_reward": reward})
