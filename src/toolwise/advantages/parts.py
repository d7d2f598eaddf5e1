"""Says what the advantages of a batch consist of, for the records: named parts that add up, and factors.

    A = Π factors · Σ parts                at each sampled token, up to the rounding of A to float32

Estimators are linear in the rewards once their scales are fixed, so what a cost contributes is the estimator applied to
that cost alone, with the scale of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from toolwise.advantages.arrays import Doubles, Ints
from toolwise.types import AdvantageParts, CreditedRollout

Unit = Literal["rollout", "step", "token"]
TOLERANCE = 1e-5
"""Relative to the parts: more than the rounding to float32."""


def attach_parts(
    credited: Sequence[CreditedRollout],
    parts: Mapping[str, Doubles],
    factors: Mapping[str, Doubles] | None = None,
    *,
    per: Unit,
    anchors: Ints | None = None,
) -> list[CreditedRollout]:
    """The rollouts with their parts, given as arrays over the batch with one entry per `per`; `anchors` per step."""
    result, first_step, first_token = [], 0, 0
    for index, rollout in enumerate(credited):
        counts = np.array([len(array) for array in rollout.advantages], dtype=np.intp)
        last_step, last_token = first_step + len(counts), first_token + int(counts.sum())

        def at_tokens(
            values: Doubles,
            index: int = index,
            counts: Ints = counts,
            steps: slice = slice(first_step, last_step),
            tokens: slice = slice(first_token, last_token),
        ) -> Doubles:
            if per == "token":
                return values[tokens]
            return np.repeat(values[steps], counts) if per == "step" else np.full(int(counts.sum()), values[index])

        found = AdvantageParts(
            {name: at_tokens(values) for name, values in parts.items()},
            {name: at_tokens(values) for name, values in (factors or {}).items()},
            None if anchors is None else tuple(anchors[first_step:last_step].tolist()),
        )
        result.append(replace(rollout, parts=found))
        first_step, first_token = last_step, last_token
    return result


def scaled_parts(rollout: CreditedRollout) -> dict[str, Doubles]:
    """The parts times the factors: they add up to the advantages. Without parts, the advantages themselves."""
    if rollout.parts is None:
        return {"trajectory": flat_advantages(rollout)}
    factor = np.ones(sum(map(len, rollout.advantages)))
    for values in rollout.parts.factors.values():
        factor = factor * values
    return {name: values * factor for name, values in rollout.parts.parts.items()}


def add_up(rollout: CreditedRollout) -> bool:
    """Whether the parts of a rollout explain its advantages: an estimator that changes those of another keeps its
    parts."""
    if rollout.parts is None:
        return True
    used = flat_advantages(rollout)
    arrays = [*rollout.parts.parts.values(), *rollout.parts.factors.values()]
    if any(np.shape(values) != used.shape for values in arrays):
        return False
    scaled = list(scaled_parts(rollout).values())
    total, size = sum(scaled, np.zeros(len(used))), sum(map(np.abs, scaled), np.abs(used))
    return bool((np.abs(total - used) <= TOLERANCE * size).all())


def flat_advantages(rollout: CreditedRollout) -> Doubles:
    return np.concatenate([np.zeros(0), *rollout.advantages]).astype(np.float64)
