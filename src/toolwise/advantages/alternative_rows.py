"""The other levels of a step as rows to learn from: CoPO's form of RLVCR trains on all four.

Such a row is a rollout of one step: the history and the forced level are its prompt, the thought and the action its
sampled tokens. The thought was drawn in that context and has the log-probs it was drawn with. The action was not: it
was drawn after the thought that the policy used. So its tokens carry the log-probs of this context, as they were
scored, and what lies between the two is a bounded weight min(π(a | this) / π(a | its own), cap) in the advantage: one
importance correction, never two. The tags between are neither sampled nor learned: they are in the prompt of a second
step. That the level was forced is not corrected for: its tokens are in no ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from toolwise.advantages.arrays import Doubles
from toolwise.advantages.assign import with_advantage
from toolwise.types import AnnotatedRollout, CreditedRollout, LevelScore, StepData, ThinkingGroup, ThinkingStep

if TYPE_CHECKING:
    from toolwise.types import Floats


def alternative_rows(
    credited: CreditedRollout, index: int, step: ThinkingStep, advantages: Doubles, *, cap: float
) -> list[CreditedRollout]:
    """One for each level that the policy did not use; `advantages` has one a level."""
    group = step.group
    assert group is not None  # whoever weighs levels has them
    taken = credited.steps[index]
    others = [score for score in group.scores if score.alternative is not None]
    return [_row(credited, taken, group, score, float(advantages[score.level - 1]), cap) for score in others]


def _row(
    credited: CreditedRollout, taken: StepData, group: ThinkingGroup, score: LevelScore, advantage: float, cap: float
) -> CreditedRollout:
    other = score.alternative
    assert other is not None  # the row of the used level is the rollout itself
    given = taken.policy_logprobs or {}
    version = other.policy_version if other.generated_tokens else given.get("policy_version", -1)
    seen = list(other.prompt_ids)
    before = [*seen, *other.sampled_ids, *score.context_ids]
    parts: list[tuple[StepData, Floats]] = []
    if len(other.sampled_ids):
        thought = _step(taken, 0, seen, other.sampled_ids, other.logprobs, version)
        parts.append((thought, np.full(len(other.sampled_ids), advantage, dtype=np.float32)))
    drawn = _sampling_logprobs(group)
    weights = np.minimum(np.exp(np.minimum(score.action_logprobs - drawn, 20.0)), cap)
    acted = _step(taken, len(parts), before, group.action_ids, score.action_logprobs, version)
    parts.append((acted, (advantage * weights).astype(np.float32)))
    steps = tuple(with_advantage(step, float(array.mean()), None) for step, array in parts)
    scored = credited.annotated.scored
    name = f"{scored.rollout.rollout_id}/step-{taken.system_step_index}/level-{score.level}"
    rollout = replace(scored.rollout, rollout_id=name, steps=steps)
    annotated = AnnotatedRollout(replace(scored, rollout=rollout, steps=steps))
    return CreditedRollout(annotated, steps, tuple(array for _, array in parts))


def _sampling_logprobs(group: ThinkingGroup) -> Any:
    """The action's log-probs in the context that it was drawn in."""
    return np.asarray(group.used.action_logprobs, dtype=np.float64)


def _step(
    taken: StepData, index: int, seen: Sequence[int], ids: Sequence[int], logprobs: Any, version: int
) -> StepData:
    drawn = {
        "prompt_ids": list(seen),
        "token_ids": list(ids),
        "logprobs": [float(x) for x in logprobs],
        "finish_reason": "stop",
        "policy_version": version,
    }
    changes = {"system_step_index": index, "policy_logprobs": drawn, "raw_policy_output": None}
    return StepData.unchecked(**{**taken.__dict__, **changes})
