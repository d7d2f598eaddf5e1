"""A threshold on route values that makes a trained router meet a budget other than the one it was trained for.

    route(x) = argmax_a  v(x, a) − λ'·ĉ(x, a)           λ' ≥ 0: tighter than trained, expensive routes more so
    route(x) = argmax_a  v(x, a) − λ'·[a is not free]    λ' < 0: looser; the router still chooses among the tools

v is the router's log-probability (or predicted reward) of a route, ĉ its expected cost. As λ' falls from +∞, every
prompt moves from its cheapest route to more expensive ones: along the upper hull of its points (ĉ, v), at offsets equal
to the slopes of the hull, up to its best route. Prompts whose best route is the free one move to their best tool last.
So one sort gives the exact mean cost at every λ'.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

OFFSET_MARGIN = 1e6
"""Distance of the outermost offsets from the lowest and the highest slope; larger than any value."""


@dataclass(frozen=True, slots=True)
class Moves:
    """The moves of all rows from cheaper to more expensive routes, the steepest first."""

    row: Ints
    before: Ints
    after: Ints
    """Route index."""
    slope: Floats
    """Gain in value per unit of expected cost."""
    first: Ints
    """The cheapest route of every row, where it starts."""


def mask_costs(values: Floats, costs: Floats) -> Floats:
    """`costs` in which a route that does not apply, with a value of −∞, is never the cheapest of its row. Both are
    [rows, routes], or `costs` has units too."""
    applies = np.isfinite(values)
    if applies.all():
        return costs
    applies = applies[..., None] if costs.ndim > values.ndim else applies
    highest = np.where(applies, costs, -np.inf).max(axis=1, keepdims=True)
    return np.asarray(np.where(applies, costs, highest + 1.0))


def hull_moves(values: Floats, costs: Floats) -> Moves:
    """The upper hull of each row's points (cost, value), from left to right; both inputs are [rows, routes]."""
    rows = np.arange(len(values))
    cheapest = costs == costs.min(axis=1, keepdims=True)
    first = np.where(cheapest, values, -np.inf).argmax(axis=1)
    current, steps = first.copy(), []
    for _ in range(values.shape[1] - 1):
        extra = costs - costs[rows, current][:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            slopes = np.where(extra > 0, (values - values[rows, current][:, None]) / extra, -np.inf)
        best = slopes.max(axis=1)
        # Of equal slopes the farthest: points in between are not corners.
        following = np.where(slopes == best[:, None], extra, -np.inf).argmax(axis=1)
        moving = np.isfinite(best)
        steps.append((rows[moving], current[moving], following[moving], best[moving]))
        current = np.where(moving, following, current)
    parts = [np.concatenate(part) for part in zip(*steps, strict=True)] if steps else [np.empty(0)] * 4
    order = np.argsort(-parts[3], kind="stable")
    row, before, after = (part[order].astype(np.int64) for part in parts[:3])
    return Moves(row, before, after, parts[3][order], first)


def _all_moves(values: Floats, costs: Floats) -> Moves:
    """All moves as λ' falls from +∞ to −∞."""
    costs = mask_costs(values, costs)
    hull = hull_moves(values, costs)
    gains = hull.slope > 0
    rows = np.arange(len(values))
    free = costs <= costs.min(axis=1, keepdims=True)
    others = np.where(free, -np.inf, values)
    # Of equals the cheapest, as in `choose_routes`.
    tool = np.where(others == others.max(axis=1, keepdims=True), -costs, -np.inf).argmax(axis=1)
    slope = others[rows, tool] - values[rows, hull.first]
    last = rows[np.isfinite(slope) & (slope <= 0)]  # the others reach a tool on their hull
    return Moves(
        np.concatenate([hull.row[gains], last]),
        np.concatenate([hull.before[gains], hull.first[last]]),
        np.concatenate([hull.after[gains], tool[last]]),
        np.concatenate([hull.slope[gains], slope[last]]),
        hull.first,
    )


def choose_routes(values: Floats, costs: Floats, offset: float) -> Ints:
    """The route of every row at an offset; the cheapest of equals."""
    costs = mask_costs(values, costs)
    charged = costs if offset >= 0 else (costs > costs.min(axis=1, keepdims=True)).astype(float)
    net = values - offset * charged
    best = net == net.max(axis=1, keepdims=True)
    return np.asarray(np.where(best, -costs, -np.inf).argmax(axis=1), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Threshold:
    """λ' for a budget. If the mean cost jumps over the budget between two offsets (many equal prompts), a share of the
    prompts uses the next looser offset, so that the mean cost still equals the budget."""

    offset: float
    looser: float
    share: float
    """Share of the prompts that use `looser`."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.offset) and math.isfinite(self.looser) and 0.0 <= self.share <= 1.0):
            raise ValueError("a threshold is not a finite number, or its share is not between 0 and 1")

    def probabilities(self, values: Floats, costs: Floats) -> Floats:
        """The probability of every route, [rows, routes]."""
        one_hot = np.eye(values.shape[1])
        tight, loose = (one_hot[choose_routes(values, costs, offset)] for offset in (self.offset, self.looser))
        return (1 - self.share) * tight + self.share * loose

    def route(self, values: Floats, costs: Floats, uniform: float) -> int:
        """The route of one prompt; `uniform` is a random number in [0, 1)."""
        offset = self.looser if uniform < self.share else self.offset
        return int(choose_routes(values[None, :], costs[None, :], offset)[0])


def find_threshold(
    values: Floats, costs: Floats, spent: Floats, budget: float, scores: Floats | None = None
) -> Threshold:
    """The offset at which the mean of `spent`, the actual cost of routes on these rows, is `budget`.

    `values` and `costs` are the router's values and expected costs for the same rows; all are [rows, routes]. If even
    the cheapest routes exceed the budget, they are used. With `scores`, the actual scores, the budget is an upper
    limit: of all offsets within it, the one with the highest mean score is used.
    """
    unit = _unit_of(costs)
    costs, spent, budget = costs / unit, spent / unit, budget / unit
    moves, rows = _all_moves(values, costs), len(values)
    # Moves with the same slope, up to rounding, are grouped: no offset separates them.
    order = np.argsort(-moves.slope, kind="stable")
    sloped = moves.slope[order]
    separate = sloped[:-1] - sloped[1:] > 1e-9 * (1 + np.abs(sloped[1:]))
    ends = np.flatnonzero(np.append(separate, True)) if len(sloped) else np.empty(0, int)
    slopes = sloped[ends]

    def running_mean(amounts: Floats) -> Floats:
        gained = (amounts[moves.row, moves.after] - amounts[moves.row, moves.before])[order]
        first = float(amounts[np.arange(rows), moves.first].mean())
        return np.asarray(first + np.concatenate([[0.0], np.cumsum(gained)[ends]]) / rows)

    spending = running_mean(spent)
    over = np.flatnonzero(spending > budget + 1e-12)
    taken = int(over[0]) - 1 if len(over) else len(ends)
    mixes = 0 <= taken < len(ends)
    if scores is not None and taken >= 0:
        means = running_mean(scores)
        best = int(np.argmax(means[: taken + 1]))
        mixes = mixes and best == taken and bool(means[taken + 1] > means[taken])
        taken = best
    tight = _offset_after(slopes, max(taken, 0), unit)
    if not mixes:
        return Threshold(tight, tight, 0.0)
    share = (budget - spending[taken]) / (spending[taken + 1] - spending[taken])
    return Threshold(tight, _offset_after(slopes, taken + 1, unit), float(np.clip(share, 0.0, 1.0)))


def _unit_of(costs: Floats) -> float:
    """A power of two near the highest cost: in this unit costs are about 1, so tolerances fit any currency, and no
    number is rounded."""
    highest = float(np.abs(costs).max(initial=0.0))
    return 2.0 ** (math.frexp(highest)[1] - 1) if highest > 0 else 1.0


def _offset_after(slopes: Floats, taken: int, unit: float) -> float:
    """An offset after `taken` groups of moves and before the next; `slopes` are per `unit` of cost."""
    offset = _between(slopes, taken)
    return offset / unit if offset > 0 else offset


def _between(slopes: Floats, taken: int) -> float:
    if not len(slopes):
        return 0.0
    if taken == 0:
        return float(slopes[0]) + OFFSET_MARGIN
    if taken == len(slopes):
        return float(slopes[-1]) - OFFSET_MARGIN
    return float((slopes[taken - 1] + slopes[taken]) / 2)
