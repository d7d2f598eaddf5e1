"""How far a validation exceeds the router's budgets; a checkpoint that does is not selected as the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

TOLERANCE = 0.05
"""A mean cost up to 5 % above a budget counts as within it."""


def overspend(spent: Mapping[str, Sequence[float]], limits: Mapping[str, float]) -> float:
    """The largest excess over a budget, relative to that budget (for a budget of 0: the mean cost); 0 if all are met.
    `spent` is unit -> cost of each rollout, `limits` unit -> budget."""
    excess = [0.0]
    for unit, limit in limits.items():
        mean = fmean(spent[unit])
        if mean > limit * (1 + TOLERANCE):
            excess.append((mean - limit) / limit if limit else mean)
    return max(excess)
