"""Thresholds on route values that meet several budgets at once, by a lottery over a few policies.

    route(x) = argmax_a  v(x, a) − Σ_u λ'_u·ĉ_u(x, a) + Σ_u β_u·[a spends in u]         λ', β ≥ 0

v is the router's log-probability (or predicted reward) of a route, ĉ its expected costs. λ' tightens, β loosens. Each
λ' gives a policy with a mean value V and mean costs C. The lottery over them is the linear program

    max Σ_k w_k·V_k    such that    Σ_k w_k·C_ku ≤ B_u,  Σ_k w_k = 1,  w ≥ 0

solved by column generation: its dual variables are the λ' of the next policy. A solution has at most one policy more
than there are budgets, and meets every binding budget exactly. A single budget is solved by one sort (threshold.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from toolwise.routing.delivered_budget import check_numbers, check_shares
from toolwise.routing.threshold import OFFSET_MARGIN, Floats, Ints, find_threshold, mask_costs

ROUNDS = 120
"""Most rounds of column generation; a round costs a few passes over the rows."""
PATIENCE = 6
"""Rounds without a better lottery before the search ends."""

Offsets = tuple[float, ...]
"""One number per unit."""


@dataclass(frozen=True, slots=True)
class JointThreshold:
    charges: tuple[Offsets, ...]
    """λ' of each policy, from tight to loose."""
    bonuses: tuple[Offsets, ...]
    """β of each policy."""
    shares: tuple[float, ...]
    """Share of the prompts that each policy routes."""

    def __post_init__(self) -> None:
        if not len(self.shares) == len(self.charges) == len(self.bonuses):
            raise ValueError("its charges, bonuses and shares are not one per policy")
        check_numbers("its charges and bonuses", *chain(*self.charges, *self.bonuses))
        check_shares(self.shares)

    def probabilities(self, values: Floats, costs: Floats) -> Floats:
        """The probability of every route, [rows, routes]; `costs` are [rows, routes, units]."""
        one_hot, total = np.eye(values.shape[1]), np.zeros(values.shape)
        for charges, bonuses, share in zip(self.charges, self.bonuses, self.shares, strict=True):
            total += share * one_hot[choose_joint(values, costs, charges, bonuses)]
        return total

    def route(self, values: Floats, costs: Floats, draw: Callable[[], float]) -> int:
        """The route of one prompt, from [routes] and [routes, units]; `draw` gives a random number in [0, 1), and is
        called only where the policies disagree: for few prompts."""
        routes = self._routes(values, costs)
        if len(set(routes)) == 1:
            return routes[0]
        drawn = int(np.searchsorted(np.cumsum(self.shares), draw(), side="right"))
        return routes[min(drawn, len(routes) - 1)]

    def _routes(self, values: Floats, costs: Floats) -> list[int]:
        """The route of one prompt by each policy."""
        pairs = list(zip(self.charges, self.bonuses, strict=True))
        if len(pairs[0][0]) == 1:
            row, prices = values.tolist(), costs[:, 0].tolist()
            return [_choose_one(row, prices, charges[0], bonuses[0]) for charges, bonuses in pairs]
        return [int(choose_joint(values[None], costs[None], *pair)[0]) for pair in pairs]


def _choose_one(values: Sequence[float], costs: Sequence[float], charge: float, bonus: float) -> int:
    """`choose_joint` for one row and one unit, without the overhead of small arrays."""
    routes = [route for route, value in enumerate(values) if value > -math.inf]
    least = min(costs[route] for route in routes)
    net = {route: values[route] - costs[route] * charge + bonus * (costs[route] > least) for route in routes}
    best = max(net.values())
    return min((route for route in routes if net[route] == best), key=costs.__getitem__)


def choose_joint(values: Floats, costs: Floats, charges: Sequence[float], bonuses: Sequence[float]) -> Ints:
    """The route of every row; the cheapest of equals. `costs` are [rows, routes, units]."""
    costs = mask_costs(values, costs)
    net = values - costs @ np.asarray(charges, dtype=np.float64)
    if any(bonuses):
        net = net + (costs > costs.min(axis=1, keepdims=True)) @ np.asarray(bonuses, dtype=np.float64)
    best = net == net.max(axis=1, keepdims=True)
    return np.asarray(np.where(best, -costs.sum(axis=2), -np.inf).argmax(axis=1), dtype=np.int64)


def fit_joint_threshold(
    values: Floats, costs: Floats, spent: Floats, limits: Sequence[float], *, loosen: bool
) -> JointThreshold:
    """The lottery whose mean of `spent`, the actual costs, is within every limit; if none is, the one that exceeds them
    least. `costs` are the expected costs that routes are charged for; both are [rows, routes, units].

    Without `loosen`, no prompt gets a more expensive route than the head's best. With it, prompts are moved to tools
    until the budgets are spent.
    """
    if len(limits) == 1:
        return _fit_one(values, costs, spent, limits[0], loosen=loosen)
    none, bounds = (0.0,) * len(limits), np.asarray(limits, dtype=np.float64)
    tight = _Columns(values, costs, spent, bounds, none).search()
    if not loosen:
        return tight
    mixture = tight.probabilities(values, costs)
    left = [float((mixture * spent[:, :, u]).sum(axis=1).mean()) < limit - 1e-9 for u, limit in enumerate(limits)]
    costs = mask_costs(values, costs)
    spends = costs > costs.min(axis=1, keepdims=True)
    bonuses = tuple(_largest_gap(values, spends[:, :, u]) if slack else 0.0 for u, slack in enumerate(left))
    return _Columns(values, costs, spent, bounds, bonuses).search() if any(bonuses) else tight


def _fit_one(values: Floats, costs: Floats, spent: Floats, limit: float, *, loosen: bool) -> JointThreshold:
    one = find_threshold(values, costs[:, :, 0], spent[:, :, 0], limit)
    pairs = [(one.offset, 1 - one.share), (one.looser, one.share)]
    if not loosen and one.offset < 0:
        pairs = [(0.0, 1.0)]
    kept = [(offset, share) for offset, share in pairs if share > 0]
    return JointThreshold(
        tuple((max(offset, 0.0),) for offset, _ in kept),
        tuple((max(-offset, 0.0),) for offset, _ in kept),
        tuple(share for _, share in kept),
    )


def _largest_gap(values: Floats, spends: Floats) -> float:
    """The bonus that makes a route that spends in a unit the best one for every row that has one."""
    gaps = values.max(axis=1) - np.where(spends, values, -np.inf).max(axis=1)
    finite = gaps[np.isfinite(gaps)]
    return 1.01 * float(finite.max()) + 1e-6 if len(finite) else 0.0


class _Columns:
    """The policies found so far, and the linear program over them."""

    def __init__(self, values: Floats, costs: Floats, spent: Floats, limits: Floats, bonuses: Offsets) -> None:
        costs = mask_costs(values, costs)
        self.values, self.costs, self.spent, self.bonuses = values, costs, spent, bonuses
        self.net = values + (costs > costs.min(axis=1, keepdims=True)) @ np.asarray(bonuses)
        self.units = len(limits)
        self.scale = np.maximum(np.abs(spent).mean(axis=(0, 1)), 1e-12)
        self.limits = limits / self.scale
        self.excess_price = 1e6 * (1.0 + float(np.ptp(self.net[np.isfinite(self.net)])))
        self.charges: list[Offsets] = []
        self.columns: list[Floats] = []
        """Mean value, then mean costs in units of `scale`."""
        self._known: set[bytes] = set()

    def add(self, charges: Sequence[float] | Floats) -> None:
        charges = [max(float(charge), 0.0) for charge in charges]
        rows, routes = np.arange(len(self.values)), choose_joint(self.values, self.costs, charges, self.bonuses)
        if (key := routes.tobytes()) in self._known:
            return
        self._known.add(key)
        self.charges.append(tuple(charges))
        means = self.spent[rows, routes].mean(axis=0) / self.scale
        self.columns.append(np.concatenate([[self.net[rows, routes].mean()], means]))

    def search(self) -> JointThreshold:
        units = range(self.units)
        self.add([0.0] * self.units)
        self.add([OFFSET_MARGIN] * self.units)
        for unit in units:
            self.add([OFFSET_MARGIN if each == unit else 0.0 for each in units])
        best, since = -np.inf, 0
        for _ in range(ROUNDS):
            weights, duals, objective = self._solve()
            since = 0 if objective > best + 1e-12 * (1 + abs(best)) else since + 1
            best = max(best, objective)
            if since > PATIENCE:
                break
            # The dual variables price actual costs, routes are charged for expected ones: so policies between those of
            # the lottery are tried too, which brings them closer together.
            self.add(duals / self.scale)
            used = np.flatnonzero(weights > 0)
            corners = np.array([self.charges[k] for k in used])
            middle = weights[used] @ corners
            for charges in (middle, corners.mean(axis=0), *((corner + middle) / 2 for corner in corners)):
                self.add(charges)
        weights, _, _ = self._solve()
        used = np.array(sorted(np.flatnonzero(weights > 0), key=lambda k: float(self.columns[k][1:].sum())))
        shares = weights[used] / weights[used].sum()
        return JointThreshold(tuple(self.charges[k] for k in used), (self.bonuses,) * len(used), tuple(shares.tolist()))

    def _solve(self) -> tuple[Floats, Floats, float]:
        """The weights of the columns, the dual variables of the budgets, and the objective.

        An excess over a budget is a variable with a high price, so that the program always has a solution."""
        columns, count = np.array(self.columns), len(self.columns)
        identity = np.concatenate([np.eye(self.units), np.zeros((1, self.units))])
        matrix = np.concatenate([np.column_stack([columns[:, 1:], np.ones(count)]).T, identity, -identity], axis=1)
        prices = np.concatenate([columns[:, 0], np.zeros(self.units), np.full(self.units, -self.excess_price)])
        over = columns[0, 1:] > self.limits
        basis = [0, *(count + unit + (self.units if over[unit] else 0) for unit in range(self.units))]
        solution, duals = simplex(matrix, np.append(self.limits, 1.0), prices, basis)
        return solution[:count], duals[:-1], float(prices @ solution)


def simplex(matrix: Floats, bounds: Floats, prices: Floats, basis: list[int]) -> tuple[Floats, Floats]:
    """The maximum of prices·x such that matrix·x = bounds and x ≥ 0, from a feasible basis: x and the dual variables.

    The most profitable column enters; after a while the first one (Bland's rule), which cannot cycle."""
    tolerance = 1e-11 * (1.0 + float(np.abs(prices).max()))
    for step in range(2000):
        square = matrix[:, basis]
        amounts = np.linalg.solve(square, bounds)
        duals = np.linalg.solve(square.T, prices[basis])
        profits = prices - duals @ matrix
        profits[basis] = 0.0
        entering = int(profits.argmax()) if step < 200 else int(np.argmax(profits > tolerance))
        if profits[entering] <= tolerance:
            break
        change = np.linalg.solve(square, matrix[:, entering])
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = np.where(change > 1e-12, np.maximum(amounts, 0.0) / change, np.inf)
        ties = np.flatnonzero(ratios <= ratios.min() + 1e-15)
        leaving = min(ties, key=lambda place: basis[place])
        basis[leaving] = entering
    solution = np.zeros(len(prices))
    solution[basis] = np.maximum(amounts, 0.0)
    return solution, np.asarray(duals, dtype=np.float64)
