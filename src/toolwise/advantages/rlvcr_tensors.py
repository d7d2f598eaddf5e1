"""RLVCR over arrays or tensors [batch, length]; a row is one step of one rollout.

`thinking_level_entropies` holds one number per row, repeated at each of its tokens. Its meaning depends on `step_uid`:

    without    the thinking advantage of the level used, already normalized over the four levels, including cost and
               diversity (`thinking_fields` provides it)
    with       the rows of one `step_uid` are the levels of one step: the one that was used and its alternatives. The
               field is then the action's mean log-prob (score "logprob", "confidence") or its mean entropy
               ("neg_entropy") in the row's own context, `thinking_token_costs` the row's thinking tokens, and the four
               levels are compared here

Formulas: `level_values.py`, `rlvcr.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from toolwise.advantages.arrays import CreditError, Doubles, Ints, check_choice, integer_codes, signs
from toolwise.advantages.grpo import group_advantages
from toolwise.advantages.level_values import (
    LevelNormalization,
    LevelScoreKind,
    copo_weights,
    diversity_bonus,
    level_advantages,
    level_scores,
)
from toolwise.advantages.rlvcr import Combine, Gate, Rlvcr
from toolwise.advantages.tensors import Array, TokenMask, as_numpy, cast_like, copy_array
from toolwise.types import LEVEL_COUNT

RowRewards = Literal["episode", "step"]
Bools = NDArray[np.bool_]


def compute_rlvcr_outcome_advantage(
    token_level_rewards: Array,
    thinking_level_entropies: Any,
    thinking_token_costs: Any,
    response_mask: Any,
    uid: Sequence[Any],
    traj_uid: Sequence[Any],
    step_advantage_w: float = 1.0,
    thinking_diversity_w: float = 0.5,
    mode: LevelNormalization = "mean_norm",
    gate: Gate = "none",
    combine: Combine = "additive",
    *,
    score: LevelScoreKind = "logprob",
    price: float = 0.0,
    step_uid: Sequence[Any] | None = None,
    levels: Sequence[int] | None = None,
    sampled: Sequence[bool] | None = None,
    thought_mask: Any = None,
    level_mask: Any = None,
    trajectory_advantages: Sequence[float] | None = None,
    norm_by_std: bool = True,
    row_rewards: RowRewards = "episode",
    succeeded: Sequence[bool] | None = None,
) -> tuple[Array, Array]:
    """(advantages, returns), equal for outcome rewards, zero off the mask.

    `uid` is a row's task, `traj_uid` its rollout. `row_rewards`: each row holds its rollout's whole reward ("episode",
    as in verl-agent) or its own part of it ("step"). `trajectory_advantages` replace GRPO's, one per row. `levels` (1
    to 4) and `sampled` (False for an alternative) go with `step_uid`. `thought_mask` marks the tokens of level and
    thought, which the gates "signed" and "success" need; `level_mask` marks those of the level, the only ones that
    "success" changes (defaults to `thought_mask`). `succeeded` has one value per row (default: advantage above 0); if
    all rows of a `uid` succeeded, "signed" acts as "success". Rows of alternatives get 0 under "additive", and their
    weight times their step's advantage under "reweight" (the learner adds importance weights). Empty rows are ignored.
    """
    mask = TokenMask.of(response_mask, rewards=token_level_rewards, entropies=thinking_level_entropies)
    Rlvcr(mode=mode, score=score, gate=gate, combine=combine)  # raises if a setting is invalid
    rows = _LevelRows.of(mask.nonempty_rows, uid, traj_uid, step_uid, levels, sampled)
    if trajectory_advantages is None:
        rewards = mask.row_sums(token_level_rewards)
        base = _episode_advantages(rewards, rows, row_rewards, norm_by_std)
    else:
        base = _check_trajectory_advantages(trajectory_advantages, len(mask.mask))
    field, costs = (_row_means(mask, values) for values in (thinking_level_entropies, thinking_token_costs))
    if gate != "none" and thought_mask is None:
        raise CreditError(f'gate = "{gate}" changes only level and thought tokens: give thought_mask')
    if step_uid is None:
        if combine == "reweight" or price:
            raise CreditError("price and reweight compare the levels of a step: give step_uid, levels and sampled")
        extra = np.nan_to_num(field)
    else:
        utilities = level_scores(field, field, score) - price * costs
        utilities += thinking_diversity_w * rows.bonus()
        if combine == "reweight":
            spread = mask.mask * rows.reweighted_advantages(base, utilities, score)[:, None]
            return _advantages_and_returns(spread, token_level_rewards)
        extra = rows.thinking_advantages(utilities, mode)
    gate_factors, level_only = _gate_factors(gate, base, rows, succeeded)
    affected = _affected_tokens(gate, level_only, mask.mask, thought_mask, level_mask)
    spread = base[:, None] * mask.mask + (step_advantage_w * gate_factors * extra)[:, None] * affected
    return _advantages_and_returns(spread * rows.sampled[:, None], token_level_rewards)


def _check_trajectory_advantages(given: Any, count: int) -> Doubles:
    values = np.asarray(as_numpy(given), dtype=np.float64)
    if values.shape != (count,) or not np.isfinite(values).all():
        raise CreditError(f"trajectory_advantages of shape {values.shape} for {count} rows; give a finite one for each")
    return values


def _gate_factors(
    gate: Gate, base: Doubles, rows: _LevelRows, succeeded: Sequence[bool] | None
) -> tuple[Doubles, Bools]:
    """The factor of each row's thinking advantage, and whether it applies to the level tokens only."""
    count = len(base)
    if gate == "none":
        return np.ones(count), np.zeros(count, dtype=bool)
    if succeeded is not None and len(succeeded) != count:
        raise CreditError(f"{len(succeeded)} succeeded for {count} rows; give one for each")
    success = np.asarray(signs(base) > 0.0 if succeeded is None else as_numpy(succeeded), dtype=bool)
    if gate == "success":
        return success.astype(np.float64), np.ones(count, dtype=bool)
    groups = integer_codes(rows.groups)
    failures = np.bincount(groups, rows.sampled & ~success, minlength=int(groups.max(initial=-1)) + 1)
    solved = (failures[groups] == 0) & (succeeded is not None)
    return np.where(solved, success, signs(base)), solved


def _affected_tokens(gate: Gate, level_only: Bools, mask: Bools, thought_mask: Any, level_mask: Any) -> Bools:
    """The tokens of each row that get its thinking advantage."""
    thought = mask if thought_mask is None else mask & as_numpy(thought_mask).astype(bool)
    if gate == "none" or level_mask is None:
        return thought
    return np.where(level_only[:, None], mask & as_numpy(level_mask).astype(bool), thought)


@dataclass(frozen=True, slots=True)
class _LevelRows:
    """The group, rollout, step and level of each row."""

    groups: list[Any]
    rollouts: Ints
    steps: Ints
    levels: Ints
    nonempty: Bools
    """Rows with tokens."""
    sampled: Bools
    """Nonempty rows that are not alternatives."""

    @classmethod
    def of(cls, nonempty: Bools, uid: Any, traj_uid: Any, step_uid: Any, levels: Any, sampled: Any) -> _LevelRows:
        count = len(nonempty)
        if step_uid is not None and (levels is None or sampled is None):
            raise CreditError("with step_uid, rows are the levels of a step: also give levels (1 to 4) and sampled")
        columns = {"uid": uid, "traj_uid": traj_uid, "step_uid": step_uid, "levels": levels, "sampled": sampled}
        for name, values in columns.items():
            if values is not None and len(values) != count:
                raise CreditError(f"{len(values)} {name} for {count} rows; give one for each")
        numbers = np.ones(count, dtype=np.intp) if levels is None else np.asarray(as_numpy(levels), dtype=np.intp)
        steps = np.arange(count) if step_uid is None else integer_codes(step_uid)
        if count and not 1 <= int(numbers.min()) <= int(numbers.max()) <= LEVEL_COUNT:
            raise CreditError(f"levels lie between {numbers.min()} and {numbers.max()}; they must lie within 1 to 4")
        if len(np.unique((steps * LEVEL_COUNT + numbers)[nonempty])) < np.count_nonzero(nonempty):
            raise CreditError("a step has two rows of one level: give one row for each level of a step_uid")
        return cls(
            list(uid.tolist() if hasattr(uid, "tolist") else uid),
            integer_codes(traj_uid),
            steps,
            numbers - 1,
            nonempty,
            nonempty if sampled is None else nonempty & np.asarray(as_numpy(sampled), dtype=bool),
        )

    def bonus(self) -> Doubles:
        """1 − the share of the row's level among the levels used in its group."""
        used = [
            int(level) + 1 if used_here else None for level, used_here in zip(self.levels, self.sampled, strict=True)
        ]
        shares = diversity_bonus(used, self.groups)
        return np.array([shares[group][level] for group, level in zip(self.groups, self.levels, strict=True)])

    def table(self, values: Doubles) -> Doubles:
        """[steps, levels]; NaN marks a missing row."""
        table = np.full((int(self.steps.max(initial=-1)) + 1, LEVEL_COUNT), np.nan)
        table[self.steps[self.nonempty], self.levels[self.nonempty]] = values[self.nonempty]
        return table

    def thinking_advantages(self, utilities: Doubles, mode: LevelNormalization) -> Doubles:
        """A_think of every row; 0 if undefined."""
        return np.nan_to_num(level_advantages(self.table(utilities), mode)[self.steps, self.levels])

    def reweighted_advantages(self, base: Doubles, utilities: Doubles, score: LevelScoreKind) -> Doubles:
        """Rows of a complete step with a positive advantage get their weight times it; other rows keep their own."""
        weights = copo_weights(self.table(utilities), score)[self.steps, self.levels]
        of_step = np.zeros(int(self.steps.max(initial=-1)) + 1)
        of_step[self.steps[self.sampled]] = base[self.sampled]
        reweighted = np.isfinite(weights) & (of_step[self.steps] > 0)
        return np.where(reweighted, np.nan_to_num(weights) * of_step[self.steps], np.where(self.sampled, base, 0.0))


def _episode_advantages(rewards: Doubles, rows: _LevelRows, row_rewards: RowRewards, norm_by_std: bool) -> Doubles:
    """GRPO over rollouts; each counts once regardless of its number of steps."""
    check_choice("row_rewards", row_rewards, get_args(RowRewards))
    used = np.flatnonzero(rows.sampled)
    codes = rows.rollouts
    count = int(codes.max(initial=-1)) + 1
    first = np.full(count, -1, dtype=np.intp)
    first[codes[used][::-1]] = used[::-1]
    if row_rewards == "step":
        totals = np.bincount(codes[used], rewards[used], count).astype(np.float64, copy=False)
    else:
        totals = np.where(first >= 0, rewards[first], 0.0)
        if not np.array_equal(totals[codes[used]], rewards[used]):
            raise CreditError(
                'rows of one traj_uid have different rewards: if each holds a part, give row_rewards="step"'
            )
    present = np.flatnonzero(first >= 0)
    advantages = np.zeros(count)
    groups = [rows.groups[first[number]] for number in present]
    advantages[present] = group_advantages(totals[present], groups, norm_by_std=norm_by_std)
    return np.asarray(advantages[codes])


def _row_means(mask: TokenMask, values: Any) -> Doubles:
    """The mean over a row's tokens; NaN (a missing level) if a token is NaN or there are none."""
    sums = np.where(mask.mask, as_numpy(values), 0.0).sum(1, dtype=np.float64)
    if (infinite := np.flatnonzero(np.isinf(sums))).size:
        raise CreditError(f"row {infinite[0]} has an infinite value; use NaN for a level that failed")
    return np.asarray(np.where(mask.nonempty_rows, sums / np.maximum(mask.lengths, 1), np.nan))


def _advantages_and_returns(spread: Any, like: Array) -> tuple[Array, Array]:
    advantages = cast_like(spread, like)
    return advantages, copy_array(advantages)
