"""By how much a validation spent more than the router's budgets allow: what keeps a checkpoint from being the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

TOLERANCE = 0.05
"""Of a budget: a mean cost up to 5 % above it counts as within."""


def overspend(spent: Mapping[str, Sequence[float]], limits: Mapping[str, float]) -> float:
    """The largest overspending among the budgets, as a share of its budget (of a budget of 0: the mean cost itself);
    0 where all are kept. `spent` has the cost of each rollout in each unit, `limits` the budgets."""
    found = [0.0]
    for unit, limit in limits.items():
        mean = fmean(spent[unit])
        if mean > limit * (1 + TOLERANCE):
            found.append((mean - limit) / limit if limit else mean)
    return max(found)
