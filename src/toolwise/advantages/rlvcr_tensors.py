"""RLVCR over arrays or tensors [batch, length], in document 5's names: a row is one step of one rollout.

`thinking_level_entropies` is one number a row, at each of its tokens. What it means depends on `step_uid`:

    without    the document's: the thinking advantage of the level that was used, normalised within its four already,
               price and diversity included (`thinking_fields` gives it)
    with       the rows of one `step_uid` are the levels of one step: the one that was used and its alternatives. The
               field is then the action's mean log-prob (score "logprob", "confidence") or its mean entropy
               ("neg_entropy") in the row's own context, `thinking_token_costs` the row's thinking tokens, and the four
               are compared here.

Formulas: `levels.py`, `rlvcr.py`.
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
    LEVEL_COUNT,
    LevelNormalization,
    LevelScoreKind,
    copo_weights,
    diversity_bonus,
    level_advantages,
    level_scores,
)
from toolwise.advantages.rlvcr import Combine, Gate
from toolwise.advantages.tensors import Array, TokenMask, as_numpy, cast_like, copy_array

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
    """(advantages, returns), equal for outcome rewards, zero off the mask. `uid`: a row's task, `traj_uid`: its rollout.

    `row_rewards`: each row has its rollout's whole reward ("episode", as in verl-agent) or its own part of it ("step").
    `trajectory_advantages` replace GRPO's, one per row.
    `levels` (1 to 4) and `sampled` (False for an alternative) go with `step_uid`. `thought_mask` marks the tokens of
    level and thought, which the gates "signed" and "success" need; `level_mask` marks those of the level, which is all
    that "success" lets in (default: `thought_mask`). `succeeded` has one value per row (default: advantage above 0);
    where all rows of a `uid` did, "signed" acts as "success". Rows of alternatives get 0 under "additive", and their
    weight times their step's advantage under "reweight" (without importance weights).
    Rows without tokens are ignored.
    """
    where = TokenMask.of(response_mask, rewards=token_level_rewards, entropies=thinking_level_entropies)
    choices = (
        ("mode", mode, LevelNormalization),
        ("gate", gate, Gate),
        ("combine", combine, Combine),
        ("score", score, LevelScoreKind),
    )
    for name, value, known in choices:
        check_choice(name, value, get_args(known))
    if combine == "reweight" and gate != "none":
        raise CreditError(f'gate = "{gate}" belongs to combine = "additive"; with "reweight" leave gate = "none"')
    rows = _LevelRows.of(where.nonempty_rows, uid, traj_uid, step_uid, levels, sampled)
    if trajectory_advantages is None:
        rewards = where.row_sums(token_level_rewards)
        base = _episode_advantages(rewards, rows, row_rewards, norm_by_std)
    else:
        base = _check_trajectory_advantages(trajectory_advantages, len(where.mask))
    field, costs = (_row_means(where, values) for values in (thinking_level_entropies, thinking_token_costs))
    if gate != "none" and thought_mask is None:
        raise CreditError(f'gate = "{gate}" changes level and thought tokens alone: give thought_mask')
    if step_uid is None:
        if combine == "reweight" or price:
            raise CreditError("price and reweight compare the levels of a step: give step_uid, levels and sampled")
        extra = np.nan_to_num(field)
    else:
        utilities = level_scores(field, field, score) - price * costs
        utilities += thinking_diversity_w * rows.bonus()
        if combine == "reweight":
            spread = where.mask * rows.reweighted_advantages(base, utilities, score)[:, None]
            return _advantages_and_returns(spread, token_level_rewards)
        extra = rows.thinking_advantages(utilities, mode)
    opened, level_only = _gate_factors(gate, base, rows, succeeded)
    meant = _affected_tokens(gate, level_only, where.mask, thought_mask, level_mask)
    spread = base[:, None] * where.mask + (step_advantage_w * opened * extra)[:, None] * meant
    return _advantages_and_returns(spread * rows.sampled[:, None], token_level_rewards)


def _check_trajectory_advantages(given: Any, count: int) -> Doubles:
    found = np.asarray(as_numpy(given), dtype=np.float64)
    if found.shape != (count,) or not np.isfinite(found).all():
        raise CreditError(f"trajectory_advantages of shape {found.shape} for {count} rows; give a finite one for each")
    return found


def _gate_factors(
    gate: Gate, base: Doubles, rows: _LevelRows, succeeded: Sequence[bool] | None
) -> tuple[Doubles, Bools]:
    """What each row's thinking advantage counts for, and whether it is for the level alone."""
    count = len(base)
    if gate == "none":
        return np.ones(count), np.zeros(count, dtype=bool)
    if succeeded is not None and len(succeeded) != count:
        raise CreditError(f"{len(succeeded)} succeeded for {count} rows; give one for each")
    won = np.asarray(signs(base) > 0.0 if succeeded is None else as_numpy(succeeded), dtype=bool)
    if gate == "success":
        return won.astype(np.float64), np.ones(count, dtype=bool)
    groups = integer_codes(rows.groups)
    lost = np.bincount(groups, rows.sampled & ~won, minlength=int(groups.max(initial=-1)) + 1)
    settled = (lost[groups] == 0) & (succeeded is not None)
    return np.where(settled, won, signs(base)), settled


def _affected_tokens(gate: Gate, level_only: Bools, mask: Bools, thought_mask: Any, level_mask: Any) -> Bools:
    """The tokens of each row that its thinking advantage is for."""
    thought = mask if thought_mask is None else mask & as_numpy(thought_mask).astype(bool)
    if gate == "none" or level_mask is None:
        return thought
    return np.where(level_only[:, None], mask & as_numpy(level_mask).astype(bool), thought)


@dataclass(frozen=True, slots=True)
class _LevelRows:
    """Whose step each row is, and which of its levels."""

    groups: list[Any]
    rollouts: Ints
    steps: Ints
    levels: Ints
    nonempty: Bools
    """Rows with tokens."""
    sampled: Bools
    """Those of them that are no alternatives."""

    @classmethod
    def of(cls, nonempty: Bools, uid: Any, traj_uid: Any, step_uid: Any, levels: Any, sampled: Any) -> _LevelRows:
        count = len(nonempty)
        if step_uid is not None and (levels is None or sampled is None):
            raise CreditError("step_uid makes rows the levels of a step: give levels (1 to 4) and sampled with it")
        given = {"uid": uid, "traj_uid": traj_uid, "step_uid": step_uid, "levels": levels, "sampled": sampled}
        for name, values in given.items():
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
        used = [int(level) + 1 if own else None for level, own in zip(self.levels, self.sampled, strict=True)]
        shares = diversity_bonus(used, self.groups)
        return np.array([shares[group][level] for group, level in zip(self.groups, self.levels, strict=True)])

    def table(self, values: Doubles) -> Doubles:
        """[steps, levels], nan where a step has no such row."""
        found = np.full((int(self.steps.max(initial=-1)) + 1, LEVEL_COUNT), np.nan)
        found[self.steps[self.nonempty], self.levels[self.nonempty]] = values[self.nonempty]
        return found

    def thinking_advantages(self, utilities: Doubles, mode: LevelNormalization) -> Doubles:
        """A_think of every row; 0 where it is nothing."""
        return np.nan_to_num(level_advantages(self.table(utilities), mode)[self.steps, self.levels])

    def reweighted_advantages(self, base: Doubles, utilities: Doubles, score: LevelScoreKind) -> Doubles:
        """Every row of a complete step with an advantage above 0 has its weight of it; others keep their own."""
        weights = copo_weights(self.table(utilities), score)[self.steps, self.levels]
        own = np.zeros(int(self.steps.max(initial=-1)) + 1)
        own[self.steps[self.sampled]] = base[self.sampled]
        weighed = np.isfinite(weights) & (own[self.steps] > 0)
        return np.where(weighed, np.nan_to_num(weights) * own[self.steps], np.where(self.sampled, base, 0.0))


def _episode_advantages(rewards: Doubles, rows: _LevelRows, row_rewards: RowRewards, norm_by_std: bool) -> Doubles:
    """GRPO over rollouts, each counted once however many steps it has."""
    check_choice("row_rewards", row_rewards, get_args(RowRewards))
    own = np.flatnonzero(rows.sampled)
    codes = rows.rollouts
    count = int(codes.max(initial=-1)) + 1
    first = np.full(count, -1, dtype=np.intp)
    first[codes[own][::-1]] = own[::-1]
    if row_rewards == "step":
        totals = np.bincount(codes[own], rewards[own], count).astype(np.float64, copy=False)
    else:
        totals = np.where(first >= 0, rewards[first], 0.0)
        if not np.array_equal(totals[codes[own]], rewards[own]):
            raise CreditError('rows of one traj_uid have unequal rewards: with a part each, give row_rewards="step"')
    found = np.flatnonzero(first >= 0)
    advantages = np.zeros(count)
    groups = [rows.groups[first[number]] for number in found]
    advantages[found] = group_advantages(totals[found], groups, norm_by_std=norm_by_std)
    return np.asarray(advantages[codes])


def _row_means(where: TokenMask, values: Any) -> Doubles:
    """The mean over a row's tokens; nan, for which there is no level, where one of them is or there are none."""
    sums = np.where(where.mask, as_numpy(values), 0.0).sum(1, dtype=np.float64)
    if (odd := np.flatnonzero(np.isinf(sums))).size:
        raise CreditError(f"row {odd[0]} has an infinite value; a level that failed is nan")
    return np.asarray(np.where(where.nonempty_rows, sums / np.maximum(where.lengths, 1), np.nan))


def _advantages_and_returns(spread: Any, like: Array) -> tuple[Array, Array]:
    made = cast_like(spread, like)
    return made, copy_array(made)
