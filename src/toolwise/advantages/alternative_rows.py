"""Training rows for the unused thinking levels of a step: RLVCR's `combine = "reweight"` (CoPO) trains on all four.

Each row is a rollout of one step: the history and the forced level are its prompt, the thought and the action its
sampled tokens. The thought was sampled in this context and keeps its sampling log-probs. The action was sampled after
the thought that the policy used, so its tokens carry the log-probs scored in this context, and the difference is
corrected by a bounded weight min(π(a | this context) / π(a | its own context), cap) in the advantage: one importance
correction, never two. The tags between thought and action are neither sampled nor trained: they are in the prompt of a
second step. The forced level is not corrected for, since its tokens are in no ratio.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from toolwise.advantages.arrays import Doubles
from toolwise.advantages.assign import with_advantage
from toolwise.types import (
    AddedRollout,
    CreditedRollout,
    LevelScore,
    SampledTokens,
    StepData,
    ThinkingGroup,
    ThinkingStep,
)

if TYPE_CHECKING:
    from toolwise.types import Floats


def alternative_rows(
    credited: CreditedRollout, index: int, step: ThinkingStep, advantages: Doubles, *, cap: float
) -> list[AddedRollout]:
    """One row per level that the policy did not use; `advantages` has one entry per level."""
    group = step.group
    assert group is not None  # only steps with a group are reweighted
    used_step = credited.steps[index]
    unused = [score for score in group.scores if score.alternative is not None]
    return [_row(credited, used_step, group, score, float(advantages[score.level - 1]), cap) for score in unused]


def _row(
    credited: CreditedRollout,
    used_step: StepData,
    group: ThinkingGroup,
    score: LevelScore,
    advantage: float,
    cap: float,
) -> AddedRollout:
    alternative = score.alternative
    assert alternative is not None  # the used level's row is the rollout itself
    used_version = used_step.tokens.policy_version
    version = alternative.policy_version if alternative.generated_tokens else used_version
    prompt_ids = list(alternative.prompt_ids)
    action_prompt = [*prompt_ids, *alternative.sampled_ids, *score.context_ids]
    parts: list[tuple[StepData, Floats]] = []
    if len(alternative.sampled_ids):
        thought = _step(used_step, 0, prompt_ids, alternative.sampled_ids, alternative.logprobs, version)
        parts.append((thought, np.full(len(alternative.sampled_ids), advantage, dtype=np.float32)))
    sampling_logprobs = np.asarray(group.used.action_logprobs, dtype=np.float64)  # in the context it was sampled in
    weights = np.minimum(np.exp(np.minimum(score.action_logprobs - sampling_logprobs, 20.0)), cap)
    action = _step(used_step, len(parts), action_prompt, group.action_ids, score.action_logprobs, version)
    parts.append((action, (advantage * weights).astype(np.float32)))
    steps = tuple(with_advantage(step, float(array.mean()), None) for step, array in parts)
    scored = credited.annotated.scored
    name = f"{scored.rollout.rollout_id}/step-{used_step.system_step_index}/level-{score.level}"
    rollout = replace(scored.rollout, rollout_id=name, steps=steps)
    return AddedRollout(replace(scored, rollout=rollout, steps=steps), tuple(array for _, array in parts))


def _step(
    used_step: StepData, index: int, prompt_ids: Sequence[int], ids: Sequence[int], logprobs: Any, version: int | None
) -> StepData:
    tokens = SampledTokens(array("i", ids), array("d", logprobs), array("i", prompt_ids), "stop", version)
    changes = {"system_step_index": index, "policy_logprobs": tokens, "raw_policy_output": None}
    return StepData.unchecked(**{**used_step.__dict__, **changes})
