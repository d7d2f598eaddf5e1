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
from typing import Any, Literal, get_args

import numpy as np

from toolwise.advantages.arrays import (
    Array,
    CreditError,
    Doubles,
    Ints,
    TokenMask,
    as_numpy,
    cast_like,
    check_choice,
    copy_array,
    integer_codes,
    signs,
)
from toolwise.advantages.grpo import group_advantages
from toolwise.advantages.level_values import (
    Bools,
    copo_weights,
    diversity_bonus,
    gate_factors,
    level_advantages,
    level_scores,
)
from toolwise.advantages.rlvcr import Rlvcr
from toolwise.config.algorithm import Gate, LevelCombination, LevelNormalization, LevelScoreKind
from toolwise.types import LEVEL_COUNT, ThinkingStep

RowRewards = Literal["episode", "step"]
Quantity = Literal["thinking_advantage", "action_logprob", "action_entropy"]


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
    combine: LevelCombination = "additive",
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
    rows = _LevelRows(mask.nonempty_rows, uid, traj_uid, step_uid, levels, sampled)
    if trajectory_advantages is None:
        base = _episode_advantages(mask.row_sums(token_level_rewards), rows, row_rewards, norm_by_std)
    else:
        base = np.asarray(as_numpy(trajectory_advantages), dtype=np.float64)
        if base.shape != rows.nonempty.shape or not np.isfinite(base).all():
            raise CreditError(
                f"trajectory_advantages of shape {base.shape} for {len(mask.mask)} rows; give a finite one for each"
            )
    field, costs = (_row_means(mask, values) for values in (thinking_level_entropies, thinking_token_costs))
    if gate != "none" and thought_mask is None:
        raise CreditError(f'gate = "{gate}" changes only level and thought tokens: give thought_mask')
    if step_uid is None and (combine == "reweight" or price):
        raise CreditError("price and reweight compare the levels of a step: give step_uid, levels and sampled")
    if step_uid is not None:
        utilities = level_scores(field, field, score) - price * costs + thinking_diversity_w * rows.bonus()
    if combine == "reweight":
        spread = mask.mask * rows.reweighted_advantages(base, utilities, score)[:, None]
    else:
        extra = np.nan_to_num(field if step_uid is None else rows.by_row(level_advantages(rows.table(utilities), mode)))
        factors, level_only = gate_factors(gate, base, *rows.successes(base, succeeded))
        affected = _affected_tokens(gate, level_only, mask.mask, thought_mask, level_mask)
        spread = base[:, None] * mask.mask + (step_advantage_w * factors * extra)[:, None] * affected
        spread = spread * rows.sampled[:, None]
    advantages = cast_like(spread, token_level_rewards)
    return advantages, copy_array(advantages)


def _affected_tokens(gate: Gate, level_only: Bools, mask: Bools, thought_mask: Any, level_mask: Any) -> Bools:
    thought = mask if thought_mask is None else mask & as_numpy(thought_mask).astype(bool)
    if gate == "none" or level_mask is None:
        return thought
    return np.where(level_only[:, None], mask & as_numpy(level_mask).astype(bool), thought)


class _LevelRows:
    """The group, rollout, step and level of each row, whether it has tokens, and whether it is not an alternative."""

    def __init__(self, nonempty: Bools, uid: Any, traj_uid: Any, step_uid: Any, levels: Any, sampled: Any) -> None:
        count = len(nonempty)
        if step_uid is not None and (levels is None or sampled is None):
            raise CreditError("with step_uid, rows are the levels of a step: also give levels (1 to 4) and sampled")
        columns = {"uid": uid, "traj_uid": traj_uid, "step_uid": step_uid, "levels": levels, "sampled": sampled}
        for name, values in columns.items():
            if values is not None and len(values) != count:
                raise CreditError(f"{len(values)} {name} for {count} rows; give one for each")
        numbers = np.ones(count, dtype=np.intp) if levels is None else np.asarray(as_numpy(levels), dtype=np.intp)
        if count and not 1 <= int(numbers.min()) <= int(numbers.max()) <= LEVEL_COUNT:
            raise CreditError(f"levels lie between {numbers.min()} and {numbers.max()}; they must lie within 1 to 4")
        self.groups = list(uid.tolist() if hasattr(uid, "tolist") else uid)
        self.rollouts = integer_codes(traj_uid)
        self.steps: Ints = np.arange(count) if step_uid is None else integer_codes(step_uid)
        self.levels = numbers - 1
        self.nonempty = nonempty
        self.sampled = nonempty if sampled is None else nonempty & np.asarray(as_numpy(sampled), dtype=bool)
        if len(np.unique((self.steps * LEVEL_COUNT + numbers)[nonempty])) < np.count_nonzero(nonempty):
            raise CreditError("a step has two rows of one level: give one row for each level of a step_uid")

    def bonus(self) -> Doubles:
        """1 − the share of the row's level among the levels used in its group."""
        used = np.where(self.sampled, self.levels + 1, 0).tolist()
        shares = diversity_bonus([level or None for level in used], self.groups)
        return np.array([shares[group][level] for group, level in zip(self.groups, self.levels, strict=True)])

    def table(self, values: Doubles) -> Doubles:
        """[steps, levels]; NaN marks a missing row."""
        table = np.full((int(self.steps.max(initial=-1)) + 1, LEVEL_COUNT), np.nan)
        table[self.steps[self.nonempty], self.levels[self.nonempty]] = values[self.nonempty]
        return table

    def by_row(self, table: Doubles) -> Doubles:
        """The entry of each row in a table [steps, levels]."""
        return np.asarray(table[self.steps, self.levels])

    def successes(self, base: Doubles, succeeded: Sequence[bool] | None) -> tuple[Bools, Bools]:
        """Whether each row succeeded, and whether all rows of its group are known to."""
        if succeeded is None:
            return signs(base) > 0.0, np.zeros(len(base), dtype=bool)
        if len(succeeded) != len(base):
            raise CreditError(f"{len(succeeded)} succeeded for {len(base)} rows; give one for each")
        success = np.asarray(as_numpy(succeeded), dtype=bool)
        groups = integer_codes(self.groups)
        failures = np.bincount(groups, self.sampled & ~success, minlength=int(groups.max(initial=-1)) + 1)
        return success, failures[groups] == 0

    def reweighted_advantages(self, base: Doubles, utilities: Doubles, score: LevelScoreKind) -> Doubles:
        """Rows of a complete step with a positive advantage get their weight times it; other rows keep their own."""
        weights = self.by_row(copo_weights(self.table(utilities), score))
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


def thinking_fields(
    steps: Sequence[ThinkingStep],
    lengths: Sequence[int],
    *,
    quantity: Quantity = "thinking_advantage",
    advantages: Sequence[float] | None = None,
    width: int | None = None,
) -> dict[str, Any]:
    """The two [batch, length] fields of RLVCR batches, of the level each step used: one value per row, repeated at each
    of its tokens.

    `thinking_level_entropies` can hold one of three quantities; a step without it has NaN. `lengths` are token counts
    per row; `advantages`, one per step (NaN: missing), are needed if that is the quantity.
    """
    if quantity == "thinking_advantage":
        if advantages is None:
            raise ValueError(
                "thinking advantages come from the estimator: pass `advantages`, or choose another quantity"
            )
        values = [float(a) for a in advantages]
    else:
        values = [np.nan if step.group is None else getattr(step.group.used, quantity) for step in steps]
    if not len(values) == len(lengths) == len(steps):
        raise ValueError(
            f"got {len(values)} values and {len(lengths)} lengths for {len(steps)} steps; pass one per step"
        )
    inside = np.arange(max([0, *lengths]) if width is None else width) < np.asarray(lengths, np.intp).reshape(-1, 1)
    fields = {
        "thinking_level_entropies": values,
        "thinking_token_costs": [float(step.thinking_tokens) for step in steps],
    }
    zero = np.float32(0.0)
    return {name: np.where(inside, np.asarray(rows, np.float32).reshape(-1, 1), zero) for name, rows in fields.items()}
