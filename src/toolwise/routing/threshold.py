"""A threshold on route odds: how a trained router is held to another budget than it was trained for.

    route(x) = argmax_a  v(x, a) − λ'·ĉ(x, a)           λ' ≥ 0: tighter than trained, the costlier the route the more
    route(x) = argmax_a  v(x, a) − λ'·[a is not free]    λ' < 0: looser; which tools to take is still the router's word

v is the router's log-probability (or predicted reward) of a route, ĉ what the route is expected to cost. As λ' falls
from +∞ every prompt moves from its cheapest route to costlier ones: along the upper hull of its points (ĉ, v), at
offsets that are the slopes of that hull, until its best route; one that is best left alone moves to its best tool
last. So the mean cost at every λ' is known exactly after one sort.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

OFFSET_MARGIN = 1e6
"""Odds beyond all odds: an offset below the lowest slope, or above the highest, by so much."""


@dataclass(frozen=True, slots=True)
class Moves:
    """All rows' steps from cheaper to costlier routes, the steepest first."""

    row: Ints
    before: Ints
    after: Ints
    """Route numbers."""
    slope: Floats
    """What the step gains for each unit that it is expected to cost."""
    first: Ints
    """The cheapest route of every row: where it stands before its first step."""


def hull_moves(values: Floats, costs: Floats) -> Moves:
    """The upper hulls of every row's points (cost, value), walked from the left; [rows, routes] both."""
    import numpy as np

    rows = np.arange(len(values))
    cheapest = costs == costs.min(axis=1, keepdims=True)
    first = np.where(cheapest, values, -np.inf).argmax(axis=1)
    current, found = first.copy(), []
    for _ in range(values.shape[1] - 1):
        more = costs - costs[rows, current][:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            slopes = np.where(more > 0, (values - values[rows, current][:, None]) / more, -np.inf)
        best = slopes.max(axis=1)
        # Of equal slopes the farthest: points on the line between are no corners.
        following = np.where(slopes == best[:, None], more, -np.inf).argmax(axis=1)
        moving = np.isfinite(best)
        found.append((rows[moving], current[moving], following[moving], best[moving]))
        current = np.where(moving, following, current)
    parts = [np.concatenate(part) for part in zip(*found, strict=True)] if found else [np.empty(0)] * 4
    order = np.argsort(-parts[3], kind="stable")
    row, before, after = (part[order].astype(np.int64) for part in parts[:3])
    return Moves(row, before, after, parts[3][order], first)


def _all_moves(values: Floats, costs: Floats) -> Moves:
    """The moves of all rows as λ' falls from +∞ to −∞."""
    import numpy as np

    hull = hull_moves(values, costs)
    gains = hull.slope > 0
    rows = np.arange(len(values))
    free = costs <= costs.min(axis=1, keepdims=True)
    others = np.where(free, -np.inf, values)
    # Of equals the cheapest, as `choose_routes` has it.
    tool = np.where(others == others.max(axis=1, keepdims=True), -costs, -np.inf).argmax(axis=1)
    slope = others[rows, tool] - values[rows, hull.first]
    last = rows[np.isfinite(slope) & (slope <= 0)]  # the rest reach a tool on their hull
    return Moves(
        np.concatenate([hull.row[gains], last]),
        np.concatenate([hull.before[gains], hull.first[last]]),
        np.concatenate([hull.after[gains], tool[last]]),
        np.concatenate([hull.slope[gains], slope[last]]),
        hull.first,
    )


def choose_routes(values: Floats, costs: Floats, offset: float) -> Ints:
    """The route of every row at an offset; of equals the cheapest."""
    import numpy as np

    counted = costs if offset >= 0 else (costs > costs.min(axis=1, keepdims=True)).astype(float)
    worth = values - offset * counted
    best = worth == worth.max(axis=1, keepdims=True)
    return np.asarray(np.where(best, -costs, -np.inf).argmax(axis=1), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Threshold:
    """λ' for a budget. Where one step of λ' would jump over the budget (many equal prompts), a share of the prompts
    is decided by the next looser offset, so that the mean cost is the budget all the same."""

    offset: float
    looser: float
    share: float
    """Of the prompts that `looser` decides."""

    def probabilities(self, values: Floats, costs: Floats) -> Floats:
        """The chance of every route, [rows, routes]."""
        import numpy as np

        every = np.eye(values.shape[1])
        tight, loose = (every[choose_routes(values, costs, offset)] for offset in (self.offset, self.looser))
        return (1 - self.share) * tight + self.share * loose

    def route(self, values: Floats, costs: Floats, uniform: float) -> int:
        """One prompt's route; `uniform` is drawn evenly from 0 to 1."""
        offset = self.looser if uniform < self.share else self.offset
        return int(choose_routes(values[None, :], costs[None, :], offset)[0])

    def state_dict(self) -> dict[str, Any]:
        return {"offset": self.offset, "looser": self.looser, "share": self.share}


def find_threshold(
    values: Floats, costs: Floats, spent: Floats, budget: float, scores: Floats | None = None
) -> Threshold:
    """The offset at which the mean of `spent`, what routes really cost on these rows, is `budget`.

    `values` and `costs` are the router's word on the same rows; all are [rows, routes]. Where even the cheapest
    routes cost more, it is they. With `scores`, what routes really earn, a budget is a limit and nothing to be used
    up: of all offsets that keep to it the one with the highest mean score is taken.
    """
    import numpy as np

    moves, rows = _all_moves(values, costs), len(values)
    # Steps of one slope, up to rounding, are taken together: no offset tells them apart.
    order = np.argsort(-moves.slope, kind="stable")
    sloped = moves.slope[order]
    falls = sloped[:-1] - sloped[1:] > 1e-9 * (1 + np.abs(sloped[1:]))
    ends = np.flatnonzero(np.append(falls, True)) if len(sloped) else np.empty(0, int)
    slopes = sloped[ends]

    def along(what: Floats) -> Floats:
        gained = (what[moves.row, moves.after] - what[moves.row, moves.before])[order]
        first = float(what[np.arange(rows), moves.first].mean())
        return np.asarray(first + np.concatenate([[0.0], np.cumsum(gained)[ends]]) / rows)

    spending = along(spent)
    over = np.flatnonzero(spending > budget + 1e-12)
    taken = int(over[0]) - 1 if len(over) else len(ends)
    if taken < 0:
        return Threshold(_offset_after(slopes, 0), _offset_after(slopes, 0), 0.0)
    if scores is not None:
        best = int(np.argmax(along(scores)[: taken + 1]))
        if best < taken:
            return Threshold(_offset_after(slopes, best), _offset_after(slopes, best), 0.0)
    tight = _offset_after(slopes, taken)
    if taken == len(ends):
        return Threshold(tight, tight, 0.0)
    if scores is not None and along(scores)[taken + 1] <= along(scores)[taken]:
        return Threshold(tight, tight, 0.0)
    share = (budget - spending[taken]) / (spending[taken + 1] - spending[taken])
    return Threshold(tight, _offset_after(slopes, taken + 1), float(np.clip(share, 0.0, 1.0)))


def _offset_after(slopes: Floats, taken: int) -> float:
    """An offset after `taken` groups of steps and before the next."""
    if not len(slopes):
        return 0.0
    if taken == 0:
        return float(slopes[0]) + OFFSET_MARGIN
    if taken == len(slopes):
        return float(slopes[-1]) - OFFSET_MARGIN
    return float((slopes[taken - 1] + slopes[taken]) / 2)
