"""Attaches computed advantages to rollouts, and calls an estimator on behalf of the training loop."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any

import numpy as np

from toolwise.advantages.arrays import CreditError, Doubles, Ints
from toolwise.advantages.parts import add_up
from toolwise.errors import ToolwiseError
from toolwise.protocols import AdvantageEstimator
from toolwise.types import AddedRollout, AnnotatedRollout, CreditedBatch, CreditedRollout, ScoredRollout, StepData
from toolwise.untrusted.user_code import call_part, describe_at, user_location

log = logging.getLogger("toolwise.advantages")


def credit(estimator: AdvantageEstimator, rollouts: Sequence[AnnotatedRollout]) -> CreditedBatch:
    """Call an estimator, which may be a user's: whatever goes wrong in it is a one-line error."""
    where = f"algorithm.adv_estimator: {type(estimator).__name__}"
    try:
        batch: Any = call_part(estimator, list(rollouts))  # a copy: what it does to the list changes nothing here
        if not isinstance(batch, CreditedBatch):
            raise CreditError(f"{where} returned a {type(batch).__name__}; return a toolwise.CreditedBatch")
        _check_rollouts(batch.rollouts, rollouts, where)
        _check_added(batch.added, where)
        credited = [_without_stale_parts(rollout, where) for rollout in batch.rollouts]
        return replace(
            batch, rollouts=credited, metrics={str(name): float(value) for name, value in batch.metrics.items()}
        )
    except ToolwiseError as fault:
        if not (location := user_location(fault)):
            raise
        raise CreditError(f"{where}: {fault}{location}") from fault
    except Exception as fault:
        raise CreditError(f"{where} failed: {describe_at(fault)}") from fault


def learns_from_equal(estimator: AdvantageEstimator, score: float) -> bool:
    """`learns_from_equal_scores` of an estimator, which may be a user's."""
    try:
        return bool(call_part(estimator.learns_from_equal_scores, score))
    except Exception as fault:
        where = f"algorithm.adv_estimator: {type(estimator).__name__}"
        raise CreditError(f"{where}: learns_from_equal_scores failed: {describe_at(fault)}") from fault


def _check_rollouts(credited: Sequence[CreditedRollout], rollouts: Sequence[AnnotatedRollout], where: str) -> None:
    if len(credited) != len(rollouts):
        raise CreditError(
            f"{where} returned {len(credited)} rollouts for {len(rollouts)}; return each with its advantages, and "
            "further ones in `added`"
        )
    for result, rollout in zip(credited, rollouts, strict=True):
        name, steps = rollout.scored.rollout.rollout_id, len(rollout.scored.steps)
        if (other := result.rollout.rollout_id) != name:
            raise CreditError(f"{where} returned rollout {other} in place of {name}; return each once, in order")
        if len(result.steps) != steps or not all(isinstance(step, StepData) for step in result.steps):
            raise CreditError(f"{where} returned other steps for rollout {name}; return its {steps} steps")
        _check_arrays("advantages", result.advantages, rollout.scored, where)
        if result.returns is not None:
            _check_arrays("returns", result.returns, rollout.scored, where)


def _without_stale_parts(rollout: CreditedRollout, where: str) -> CreditedRollout:
    if add_up(rollout):
        return rollout
    _warn_of_parts(where)
    return replace(rollout, parts=None)


@cache
def _warn_of_parts(where: str) -> None:
    log.warning("%s: parts that do not add up to the advantages are not recorded; return rollouts without them", where)


def _check_added(added: Any, where: str) -> None:
    if not isinstance(added, Sequence):
        raise CreditError(f"{where} returned {added!r:.80} as `added`; return a list of toolwise.types.AddedRollout")
    for row in added:
        if not isinstance(row, AddedRollout) or not isinstance(row.scored, ScoredRollout):
            raise CreditError(
                f"{where} returned {row!r:.80} in `added`; use toolwise.types.AddedRollout(scored, advantages)"
            )
        _check_arrays("advantages", row.advantages, row.scored, where)


def check_added_tokens(added: Sequence[AddedRollout], vocabulary: int) -> None:
    """Raise for a token that the model does not have."""
    for tokens in (step.tokens for row in added for step in row.scored.steps):
        if (largest := max((*tokens.prompt_ids, *tokens.token_ids), default=-1)) >= vocabulary:
            raise CreditError(
                f"algorithm.adv_estimator: a rollout in `added` has the token id {largest}, but the model has only "
                f"{vocabulary} tokens"
            )


def _check_arrays(what: str, arrays: Any, scored: ScoredRollout, where: str) -> None:
    """Raise unless there is an array of finite numbers for each step of a rollout, one for each sampled token."""
    name, steps = scored.rollout.rollout_id, scored.steps
    if not isinstance(arrays, Sequence) or len(arrays) != len(steps):
        count = len(arrays) if isinstance(arrays, Sequence) else f"a {type(arrays).__name__}, not"
        raise CreditError(
            f"{where} returned {count} arrays of {what} for the {len(steps)} steps of rollout {name}; return one for "
            "each"
        )
    for step, array in zip(steps, arrays, strict=True):
        if not isinstance(array, np.ndarray) or array.shape != (sampled_tokens(step),):
            raise CreditError(
                f"{where}: the {what} of rollout {name}, step {step.system_step_index}, must be an array of "
                f"{sampled_tokens(step)} numbers, one for each sampled token"
            )
        if array.dtype.kind != "f" or not np.isfinite(array).all():
            raise CreditError(f"{where}: the {what} of rollout {name} are not all finite numbers")


def sampled_tokens(step: StepData) -> int:
    """The number of tokens that the policy sampled in this step; 0 if it reported none."""
    return len(step.tokens.token_ids)


def with_advantage(step: StepData, advantage: float, return_to_go: float | None) -> StepData:
    """A copy of `step` with both values set. Skips validation, since the other fields are already valid."""
    return type(step).unchecked(**{**step.__dict__, "advantage": advantage, "return_to_go": return_to_go})


def credit_rollout(rollout: AnnotatedRollout, advantage: float) -> CreditedRollout:
    """Gives every step and every sampled token the same advantage."""
    return _credit_steps(rollout, [with_advantage(s, advantage, s.return_to_go) for s in rollout.scored.steps])


def _credit_steps(rollout: AnnotatedRollout, steps: Sequence[StepData]) -> CreditedRollout:
    tokens = tuple(np.full(sampled_tokens(step), step.advantage, dtype=np.float32) for step in steps)
    return CreditedRollout(rollout, tuple(steps), tokens)


def credit_steps(rollouts: Sequence[AnnotatedRollout], advantages: Doubles, returns: Doubles) -> list[CreditedRollout]:
    """Assigns one advantage and return per step, in rollout order; all sampled tokens of a step get its advantage."""
    steps = (step for rollout in rollouts for step in rollout.scored.steps)
    credited = map(with_advantage, steps, advantages.tolist(), returns.tolist())
    return [_credit_steps(rollout, list(islice(credited, len(rollout.scored.steps)))) for rollout in rollouts]


def credit_tokens(
    rollouts: Sequence[AnnotatedRollout], counts: Ints, advantages: Doubles, returns: Doubles
) -> list[CreditedRollout]:
    """Assigns one advantage and return per sampled token; `counts` is the number of tokens per step, in rollout order.

    A step's advantage is the mean over its tokens, and its return that of its first token; 0 if it has no tokens.
    """
    ends = np.cumsum(counts)[:-1] if len(counts) else counts
    by_step = iter(zip(np.split(advantages, ends), np.split(returns, ends), strict=True))
    credited = []
    for rollout in rollouts:
        parts = [next(by_step) for _ in rollout.scored.steps]
        steps = tuple(
            with_advantage(step, float(a.mean()) if len(a) else 0.0, float(r[0]) if len(r) else 0.0)
            for step, (a, r) in zip(rollout.scored.steps, parts, strict=True)
        )
        tokens, token_returns = (tuple(part[i].astype(np.float32) for part in parts) for i in (0, 1))
        credited.append(CreditedRollout(rollout, steps, tokens, token_returns))
    return credited
