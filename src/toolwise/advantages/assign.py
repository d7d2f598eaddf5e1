"""Attaches computed advantages to rollouts, and calls an estimator on behalf of the training loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from toolwise.advantages.arrays import CreditError, Doubles, Ints
from toolwise.errors import ToolwiseError
from toolwise.protocols import AdvantageEstimator
from toolwise.types import AnnotatedRollout, CreditedBatch, CreditedRollout, StepData
from toolwise.untrusted.user_code import call_user_code, describe, user_location


def credit(estimator: AdvantageEstimator, rollouts: Sequence[AnnotatedRollout]) -> CreditedBatch:
    """Call an estimator, which may be a user's: whatever goes wrong in it is a one-line error."""
    where = f"algorithm.adv_estimator: {type(estimator).__name__}"
    try:
        batch: Any = call_user_code(estimator, list(rollouts))  # a copy: what it does to the list changes nothing here
        if not isinstance(batch, CreditedBatch):
            raise CreditError(f"{where} returned a {type(batch).__name__}; return a toolwise.CreditedBatch")
        _check_rollouts(batch.rollouts, rollouts, where)
        return replace(batch, metrics={str(name): float(value) for name, value in batch.metrics.items()})
    except ToolwiseError:
        raise
    except Exception as fault:
        raise CreditError(f"{where} failed: {' '.join(describe(fault).split())}{user_location(fault)}") from fault


def _check_rollouts(credited: Sequence[CreditedRollout], rollouts: Sequence[AnnotatedRollout], where: str) -> None:
    if len(credited) != len(rollouts):
        raise CreditError(
            f"{where} returned {len(credited)} rollouts for {len(rollouts)}; return each with its advantages, and "
            "further ones in `added`"
        )
    for result, rollout in zip(credited, rollouts, strict=True):
        name, steps = rollout.scored.rollout.rollout_id, len(rollout.scored.steps)
        if result.rollout.rollout_id != name:
            other = result.rollout.rollout_id
            raise CreditError(f"{where} returned rollout {other} in place of {name}; return each once, in order")
        if not len(result.steps) == len(result.advantages) == steps:
            raise CreditError(
                f"{where} returned {len(result.advantages)} arrays of advantages for the {steps} steps of rollout "
                f"{name}; return one for each"
            )
        for step, advantages in zip(rollout.scored.steps, result.advantages, strict=True):
            if not isinstance(advantages, np.ndarray) or advantages.shape != (sampled_tokens(step),):
                raise CreditError(
                    f"{where}: the advantages of rollout {name}, step {step.system_step_index}, must be an array of "
                    f"{sampled_tokens(step)} numbers, one for each sampled token"
                )
            if advantages.dtype.kind != "f" or not np.isfinite(advantages).all():
                raise CreditError(f"{where}: the advantages of rollout {name} are not all finite numbers")


def sampled_tokens(step: StepData) -> int:
    """The number of tokens that the policy sampled in this step; 0 if it reported none."""
    return len(step.tokens.token_ids)


def with_advantage(step: StepData, advantage: float, return_to_go: float | None) -> StepData:
    """A copy of `step` with both values set. Skips validation, since the other fields are already valid."""
    return type(step).unchecked(**{**step.__dict__, "advantage": advantage, "return_to_go": return_to_go})


def credit_rollout(rollout: AnnotatedRollout, advantage: float) -> CreditedRollout:
    """Gives every step and every sampled token the same advantage."""
    steps = rollout.scored.steps
    return CreditedRollout(
        rollout,
        tuple(with_advantage(step, advantage, step.return_to_go) for step in steps),
        tuple(np.full(sampled_tokens(step), advantage, dtype=np.float32) for step in steps),
    )


def credit_steps(rollouts: Sequence[AnnotatedRollout], advantages: Doubles, returns: Doubles) -> list[CreditedRollout]:
    """Assigns one advantage and return per step, in rollout order; all sampled tokens of a step get its advantage."""
    values, return_values = iter(advantages.tolist()), iter(returns.tolist())
    credited = []
    for rollout in rollouts:
        steps = tuple(with_advantage(step, next(values), next(return_values)) for step in rollout.scored.steps)
        tokens = tuple(np.full(sampled_tokens(step), step.advantage, dtype=np.float32) for step in steps)
        credited.append(CreditedRollout(rollout, steps, tokens))
    return credited


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
