"""From outcomes and a router's word on the same rows to its frontier, beside the baselines and the oracle.

Nothing is rolled out here: who routes otherwise gets another mixture of the same outcomes, so all differences are
paired. A router is held to a budget by a threshold that was found on other rows than those it is judged by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from toolwise.errors import ConfigError
from toolwise.frontier.bootstrap import Estimate, estimate, row_weights
from toolwise.frontier.curves import Curve, blind_curve, oracle_curve, random_curve
from toolwise.frontier.outcomes import OutcomeTable
from toolwise.routing.threshold import Threshold, find_threshold

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RouteValues:
    """What a router says of every row: log-probs (or predicted rewards), and what it expects routes to cost."""

    values: Floats
    """[rows, routes]"""
    costs: Floats | None = None
    """Of a router that predicts them; else the mean cost of each route on the rows that thresholds are found on."""
    samples: bool = True
    """Whether `values` are log-probs, so that there is a policy as it was trained, without any threshold."""


@dataclass(frozen=True, slots=True)
class Point:
    """One place on the plane of cost and score."""

    budget: float | None
    """None for those who know of no budget."""
    cost: Estimate
    score: Estimate


@dataclass(frozen=True, slots=True)
class Frontier:
    """All there is to show of one comparison."""

    rows: int
    left_out: int
    """Rows that could not be scored under every route."""
    draws: int
    curves: Mapping[str, list[Point]]
    """Those who can spend more or less: a point a budget."""
    fixed: Mapping[str, Point]
    gap_closed: Mapping[str, list[Estimate]]
    """For each router, a budget: (score − random's) / (oracle's − random's), all at the cost it really had."""
    as_trained: Mapping[str, Estimate]
    """Of the first router without any threshold, at the cost it came to have: `gap_closed`; random's, the oracle's, …
    score; and of every other router by name its score when held to that cost, "…, cost", and "ahead of …": how far
    the first is. Empty for a router that has no policy of its own."""
    at_its_cost: Mapping[str, list[Estimate]]
    """Random's, the oracle's, … score at the cost that the first router really had, a budget."""
    ahead: Mapping[str, list[Estimate]] = field(default_factory=dict)
    """The first router's score less that of every other one, a budget."""
    shares: list[dict[str, float]] = field(default_factory=list)
    """A budget: route -> the share of rows that the router gives it."""


def compute_frontier(
    outcomes: OutcomeTable,
    routers: Mapping[str, RouteValues],
    budgets: Sequence[float],
    *,
    routes: Sequence[str],
    replicates: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Frontier:
    """`routers` are by name, the one that is judged first; `routes` are those among the outcomes' that they choose
    from, the one that calls no tools first. All other columns of the outcomes stand for themselves."""
    _check(budgets, routers)
    found, left_out, kept = _complete_rows(outcomes)
    chosen = found.select_routes(routes)
    weights = row_weights(len(found.row_ids), replicates, seed)
    rows = _RowMeans(chosen.mean_over_draws("scores"), chosen.mean_over_draws("costs"), weights, seed)
    lines = _reference_curves(chosen, rows.scores, rows.costs, weights)
    words = {name: _select_rows(router_values, kept) for name, router_values in routers.items()}
    held = {
        name: [rows.at_budget(router_values, budget) for budget in budgets] for name, router_values in words.items()
    }
    trained = {
        name: rows.evaluate_mixture(_softmax(router_values))
        for name, router_values in words.items()
        if router_values.samples
    }
    judged, *others = held
    curves = {name: [_curve_point(level, budget, line, weights) for budget in budgets] for name, line in lines.items()}
    for name, spent in held.items():
        curves[name] = [_point(level, each, budget) for each, budget in zip(spent, budgets, strict=True)]
    ahead = {
        name: [estimate(own.score - other.score, level) for own, other in zip(held[judged], held[name], strict=True)]
        for name in others
    }
    return Frontier(
        rows=len(found.row_ids),
        left_out=left_out,
        draws=outcomes.scores.shape[2],
        curves=curves,
        fixed=_fixed_points(found, routes, weights, level)
        | {f"{name}, as trained": _point(level, each) for name, each in trained.items()},
        gap_closed={
            name: [estimate(_gap_closed(each, lines), level) for each in spent] for name, spent in held.items()
        },
        as_trained=_as_trained(rows, words, trained, lines, level),
        at_its_cost={
            name: [estimate(line.score_at(each.cost), level) for each in held[judged]] for name, line in lines.items()
        },
        ahead=ahead,
        shares=[dict(zip(routes, each.mixture.mean(axis=0).tolist(), strict=True)) for each in held[judged]],
    )


@dataclass(frozen=True, slots=True)
class _MixtureResult:
    """What a mixture of routes comes to: [replicates] each."""

    mixture: Floats
    cost: Floats
    score: Floats


@dataclass(frozen=True, slots=True)
class _RowMeans:
    """The means of all draws, [rows, routes], and how rows are resampled."""

    scores: Floats
    costs: Floats
    weights: Floats
    seed: int

    def evaluate_mixture(self, mixture: Floats) -> _MixtureResult:
        cost, score = ((mixture * what).sum(axis=1) for what in (self.costs, self.scores))
        return _MixtureResult(mixture, self.weights @ cost, self.weights @ score)

    def at_budget(self, router_values: RouteValues, budget: float) -> _MixtureResult:
        """Two halves, each routed by the threshold that was found on the other; of a single row, its own."""
        import numpy as np

        count = len(self.costs)
        order = np.random.default_rng(self.seed).permutation(count)
        halves = [order[: count // 2], order[count // 2 :]] if count > 1 else [order, order]
        out = np.empty_like(self.costs)
        for here, there in (halves, halves[::-1]):
            means = np.broadcast_to(self.costs[there].mean(axis=0), self.costs.shape)
            costs = router_values.costs if router_values.costs is not None else means
            threshold = find_threshold(
                router_values.values[there], costs[there], self.costs[there], budget, self.scores[there]
            )
            out[here] = threshold.probabilities(router_values.values[here], costs[here])
        return self.evaluate_mixture(out)


def _as_trained(
    rows: _RowMeans,
    words: Mapping[str, RouteValues],
    trained: Mapping[str, _MixtureResult],
    lines: Mapping[str, Curve],
    level: float,
) -> dict[str, Estimate]:
    """The first router without any threshold, at the cost it came to have."""
    judged, *others = words
    if judged not in trained:
        return {}
    own = trained[judged]
    told = {"gap_closed": estimate(_gap_closed(own, lines), level)}
    told |= {name: estimate(line.score_at(own.cost), level) for name, line in lines.items()}
    for name in others:
        other = rows.at_budget(words[name], float(own.cost[0]))
        told |= {
            name: estimate(other.score, level),
            f"{name}, cost": estimate(other.cost, level),
            f"ahead of {name}": estimate(own.score - other.score, level),
        }
    return told


def _softmax(router_values: RouteValues) -> Floats:
    import numpy as np

    odds = np.exp(router_values.values - router_values.values.max(axis=1, keepdims=True))
    return np.asarray(odds / odds.sum(axis=1, keepdims=True))


def _point(level: float, spent: _MixtureResult, budget: float | None = None) -> Point:
    return Point(budget, estimate(spent.cost, level), estimate(spent.score, level))


def calibrate(
    router_values: RouteValues, spent: Floats, scores: Floats, budgets: Sequence[float]
) -> tuple[list[Threshold], Floats]:
    """The thresholds to be stored with a checkpoint, found on all rows, and each route's mean cost on them.

    `spent` and `scores` [rows, routes] are what routes really cost and earn: the mean over a row's draws.
    """
    import numpy as np

    means = spent.mean(axis=0)
    costs = router_values.costs if router_values.costs is not None else np.broadcast_to(means, spent.shape)
    return [find_threshold(router_values.values, costs, spent, budget, scores) for budget in budgets], means


def _curve_point(level: float, budget: float, line: Curve, weights: Floats) -> Point:
    import numpy as np

    asked = np.full(len(weights), budget)
    return Point(budget, estimate(line.clip_cost(asked), level), estimate(line.score_at(asked), level))


def _check(budgets: Sequence[float], routers: Mapping[str, RouteValues]) -> None:
    import numpy as np

    if not budgets or any(not np.isfinite(b) or b < 0 for b in budgets):
        raise ConfigError(f"budgets are {list(budgets)}: give one or more, none below 0")
    for name, router_values in routers.items():
        if not np.isfinite(router_values.values).all():
            raise ConfigError(f"{name} says something of a row that is no number: is its head damaged?")


def _complete_rows(outcomes: OutcomeTable) -> tuple[OutcomeTable, int, NDArray[np.int64]]:
    import numpy as np

    found, left_out = outcomes.complete_rows()
    known = set(found.row_ids)
    kept = np.array([i for i, row in enumerate(outcomes.row_ids) if row in known])
    return found, left_out, kept


def _select_rows(router_values: RouteValues, kept: NDArray[np.int64]) -> RouteValues:
    return RouteValues(
        router_values.values[kept],
        None if router_values.costs is None else router_values.costs[kept],
        router_values.samples,
    )


def _reference_curves(chosen: OutcomeTable, scores: Floats, costs: Floats, weights: Floats) -> dict[str, Curve]:
    lines = {
        "random": random_curve(scores, costs, weights, free=0),
        "best blind lottery": blind_curve(scores, costs, weights),
        "oracle": oracle_curve(scores, costs, weights),
    }
    half = chosen.scores.shape[2] // 2
    if half:
        known, paid = chosen.select_draws(slice(0, half)), chosen.select_draws(slice(half, None))
        parts = [part.mean_over_draws(what) for part in (known, paid) for what in ("scores", "costs")]
        import numpy as np

        if all(np.isfinite(part).all() for part in parts):
            lines["oracle, other draws"] = oracle_curve(
                parts[0], parts[1], weights, paid_scores=parts[2], paid_costs=parts[3]
            )
    return lines


def _fixed_points(found: OutcomeTable, routes: Sequence[str], weights: Floats, level: float) -> dict[str, Point]:
    """Every column by itself."""
    scores, costs = weights @ found.mean_over_draws("scores"), weights @ found.mean_over_draws("costs")
    return {
        (f"always {name}" if name in routes else name): Point(
            None, estimate(costs[:, i], level), estimate(scores[:, i], level)
        )
        for i, name in enumerate(found.routes)
    }


def _gap_closed(spent: _MixtureResult, lines: Mapping[str, Curve]) -> Floats:
    """Undefined where there is no gap to close."""
    import numpy as np

    low, high = lines["random"].score_at(spent.cost), lines["oracle"].score_at(spent.cost)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(high - low > 1e-9, (spent.score - low) / (high - low), np.nan)
