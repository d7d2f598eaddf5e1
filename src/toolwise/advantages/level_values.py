"""The value of each thinking level for an action, and the training rows of the levels a step did not use.

Values are arrays [steps, levels]; NaN marks a missing level.

Shared by `rlvcr.py` and `rlvcr_tensors.py`.

    u_l       = score_l − λ·tokens_l + bonus_l          before centering: afterwards the cost would penalize all levels
    A_think   = u_used − mean(u)                        mode = "mean_norm"
    A_think   = (u_used − mean(u)) / (std(u) + 1e-6)    mode = "mean_std_norm", sample std
    w_l       = exp(2·n_l) / mean exp(2·n)              n: c_l = exp(u_l), min-max scaled to [0, 1]

score: the mean log-prob of the action's tokens, its exponential ("confidence"), or minus their mean entropy. With fewer
than two levels, or equal values, A_think is exactly 0 and the weights are 1.

RLVCR's `combine = "reweight"` (CoPO) trains on the rows of all four levels. Each row is a rollout of one step: the
history and the forced level are its prompt, the thought and the action its sampled tokens. The thought was sampled in
this context and keeps its sampling log-probs. The action was sampled after the thought that the policy used, so its
tokens carry the log-probs scored in this context, and the difference is corrected by a bounded weight min(π(a | this
context) / π(a | its own context), cap) in the advantage: one importance correction, never two. The tags between thought
and action are neither sampled nor trained: they are in the prompt of a second step. The forced level is not corrected
for, since its tokens are in no ratio.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolwise.advantages.arrays import Doubles, normalize, signs
from toolwise.config.algorithm import Gate, LevelNormalization, LevelScoreKind
from toolwise.types import LEVEL_COUNT, AddedRollout, CreditedRollout, SampledTokens, StepData, ThinkingStep

Bools = NDArray[np.bool_]
MIN_SPREAD_NATS = 0.05
"""A smaller spread of scores is noise and must not be scaled up to the full range."""


def level_scores(logprobs: Doubles, entropies: Doubles, score: LevelScoreKind) -> Doubles:
    """The score of each level from its mean log-prob or mean entropy."""
    if score == "neg_entropy":
        return np.asarray(-entropies)
    return np.asarray(np.exp(logprobs)) if score == "confidence" else logprobs


def diversity_bonus(levels: Sequence[int | None], groups: Sequence[str]) -> dict[str, Doubles]:
    """Maps each group to 1 − the share of each level among its steps. Takes one level and one group id per step."""
    counts: dict[str, Doubles] = {}
    for level, group in zip(levels, groups, strict=True):
        group_counts = counts.setdefault(group, np.zeros(LEVEL_COUNT))
        if level is not None:
            group_counts[level - 1] += 1
    return {group: 1.0 - count / max(1.0, count.sum()) for group, count in counts.items()}


def level_advantages(utilities: Doubles, mode: LevelNormalization = "mean_norm") -> Doubles:
    """A_think of every level; NaN for missing levels."""
    present = np.isfinite(utilities)
    advantages = np.full(utilities.shape, np.nan)
    advantages[present] = normalize(utilities[present], np.nonzero(present)[0], mode)
    return advantages


def copo_weights(utilities: Doubles, score: LevelScoreKind = "logprob", *, floor: float = MIN_SPREAD_NATS) -> Doubles:
    """w of every level, with mean 1 in each step; NaN in steps with missing levels."""
    weights = np.full(utilities.shape, np.nan)
    complete = np.isfinite(utilities).all(1)
    u = utilities[complete]
    c = np.exp(u - u.max(1, keepdims=True)) if score == "logprob" else u  # min-max ignores a common factor
    low, high = c.min(1, keepdims=True), c.max(1, keepdims=True)
    flat = (np.ptp(u, axis=1) < floor)[:, None] | (high <= low)
    scaled = np.exp(2.0 * np.where(flat, 0.5, (c - low) / np.where(flat, 1.0, high - low)))
    weights[complete] = scaled / scaled.mean(1, keepdims=True)
    return weights


def gate_factors(gate: Gate, advantages: Doubles, succeeded: Bools, solved: Bools) -> tuple[Doubles, Bools]:
    """The factor of each step's A_think, and whether it applies to the level tokens only.

    `solved`: every rollout of the step's group succeeded, so nothing distinguishes good actions from bad ones.
    """
    if gate == "none":
        return np.ones(len(advantages)), np.zeros(len(advantages), dtype=bool)
    level_only = solved | (gate == "success")
    return np.where(level_only, succeeded, signs(advantages)), level_only


def alternative_rows(
    credited: CreditedRollout, index: int, step: ThinkingStep, advantages: Doubles, *, cap: float
) -> list[AddedRollout]:
    """One row per level that the policy did not use; `advantages` has one entry per level."""
    group, used_step, scored = step.group, credited.steps[index], credited.annotated.scored
    assert group is not None  # only steps with a group are reweighted
    sampling_logprobs = np.asarray(group.used.action_logprobs, dtype=np.float64)  # in the context it was sampled in
    rows = []
    for score in group.scores:
        if (alternative := score.alternative) is None:  # the used level's row is the rollout itself
            continue
        advantage, sampled_ids = float(advantages[score.level - 1]), alternative.sampled_ids
        version = alternative.policy_version if alternative.generated_tokens else used_step.tokens.policy_version
        action_prompt = [*alternative.prompt_ids, *sampled_ids, *score.context_ids]
        weights = np.minimum(np.exp(np.minimum(score.action_logprobs - sampling_logprobs, 20.0)), cap)
        tokens = [_tokens(action_prompt, group.action_ids, score.action_logprobs, version)]
        arrays = [(advantage * weights).astype(np.float32)]
        if len(sampled_ids):
            tokens.insert(0, _tokens(alternative.prompt_ids, sampled_ids, alternative.logprobs, version))
            arrays.insert(0, np.full(len(sampled_ids), advantage, dtype=np.float32))
        steps = tuple(
            StepData.unchecked(
                **{
                    **used_step.__dict__,
                    "system_step_index": number,
                    "policy_logprobs": part,
                    "raw_policy_output": None,
                    "advantage": float(values.mean()),
                    "return_to_go": None,
                }
            )
            for number, (part, values) in enumerate(zip(tokens, arrays, strict=True))
        )
        name = f"{scored.rollout.rollout_id}/step-{used_step.system_step_index}/level-{score.level}"
        rollout = replace(scored.rollout, rollout_id=name, steps=steps)
        rows.append(AddedRollout(replace(scored, rollout=rollout, steps=steps), tuple(arrays)))
    return rows


def _tokens(prompt_ids: Sequence[int], ids: Sequence[int], logprobs: Any, version: int | None) -> SampledTokens:
    return SampledTokens(array("i", ids), array("d", logprobs), array("i", prompt_ids), "stop", version)
