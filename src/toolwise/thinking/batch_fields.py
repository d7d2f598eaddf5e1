"""The two [batch, length] fields of RLVCR batches, from typed steps: one value per row, repeated at each of its tokens.

`thinking_level_entropies` can hold one of three quantities; the caller chooses. A step without it has NaN, which
`compute_rlvcr_outcome_advantage` treats as missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from toolwise.types import ThinkingStep

Quantity = Literal["thinking_advantage", "action_logprob", "action_entropy"]


def thinking_fields(
    steps: Sequence[ThinkingStep],
    lengths: Sequence[int],
    *,
    quantity: Quantity = "thinking_advantage",
    advantages: Sequence[float] | None = None,
    width: int | None = None,
) -> dict[str, Any]:
    """`thinking_level_entropies` and `thinking_token_costs` of the level each step used. `lengths` are token counts per
    row; `advantages`, one per step (NaN: missing), are needed if that is the quantity."""
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
    shape = (len(steps), max([0, *lengths]) if width is None else width)
    inside = np.arange(shape[1]) < np.asarray(lengths, dtype=np.intp).reshape(-1, 1)
    costs = [float(step.thinking_tokens) for step in steps]
    return {
        "thinking_level_entropies": _fill_rows(values, inside),
        "thinking_token_costs": _fill_rows(costs, inside),
    }


def _fill_rows(values: Sequence[float], inside: Any) -> Any:
    return np.where(inside, np.asarray(values, dtype=np.float32).reshape(-1, 1), np.float32(0.0))
