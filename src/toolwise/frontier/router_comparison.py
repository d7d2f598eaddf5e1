"""Computes a router's frontier, the baselines' and the oracle's from stored outcomes of the same rows.

Nothing is rolled out here: every router is a mixture over the same outcomes, so all differences are paired. A router
meets a budget through a threshold that was fitted on other rows than those it is evaluated on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolwise.errors import ConfigError
from toolwise.frontier.reference_curves import (
    Curve,
    Estimate,
    estimate,
    fixed_mixture_curve,
    oracle_curve,
    random_curve,
    row_weights,
)
from toolwise.frontier.rollout_pool import OutcomeTable
from toolwise.routing.threshold import Floats, Threshold, find_threshold
from toolwise.serialization.json_text import to_jsonable

SAMPLED, AS_DELIVERED = ", sampled, not calibrated", ", as delivered"
"""What a router is called without the thresholds of an evaluation: its head alone, and with those of training."""


@dataclass(frozen=True, slots=True)
class RouteValues:
    """A router's output for every row: log-probs (or predicted rewards) of the routes, and their expected costs."""

    values: Floats
    """[rows, routes]"""
    costs: Floats | None = None
    """[rows, routes] predicted costs; None: use the mean cost of each route on the rows thresholds are fitted on."""
    samples: bool = True
    """Whether `values` are log-probs, so that routes can be sampled from them without a threshold."""
    columns: tuple[str, ...] | None = None
    """The outcome columns it chooses from, the one without tools first; None: the routes."""

    def select_rows(self, chosen: NDArray[Any]) -> RouteValues:
        return replace(self, values=self.values[chosen], costs=None if self.costs is None else self.costs[chosen])

    def expected_costs(self, route_means: Floats) -> Floats:
        return np.broadcast_to(route_means, self.values.shape) if self.costs is None else self.costs


@dataclass(frozen=True, slots=True)
class Point:
    budget: float | None
    """None for methods without a budget."""
    cost: Estimate
    score: Estimate


@dataclass(frozen=True, slots=True)
class Frontier:
    rows: int
    left_out: int
    """Rows that could not be scored under every route."""
    draws: int
    curves: Mapping[str, list[Point]]
    """Methods that can meet a budget: one point per budget."""
    fixed: Mapping[str, Point]
    """Methods without a budget."""
    gap_closed: Mapping[str, list[Estimate]]
    """Per router and budget: (score − random) / (oracle − random), all three at the router's actual cost."""
    as_trained: Mapping[str, Estimate]
    """The first router without a threshold, at the cost it then has: `gap_closed`, the score of each reference curve
    at that cost, and for every other router NAME its score at that cost (NAME), its cost ("NAME, cost") and the first
    router's lead ("ahead of NAME"). Empty if the first router gives no probabilities."""
    as_delivered: Mapping[str, Estimate]
    """The same for the first router with the thresholds of its training; empty if it has none."""
    against_fixed: Mapping[str, Mapping[str, Estimate]]
    """Per column without a route (all tools, other actors): the first router's score and cost, routed for that column's
    cost, and what it is ahead by and costs more by."""
    at_its_cost: Mapping[str, list[Estimate]]
    """Per reference curve and budget: its score at the first router's actual cost."""
    ahead: Mapping[str, list[Estimate]]
    """Per other router and budget: the first router's score minus the other's."""
    shares: list[dict[str, float]]
    """Per budget: route -> share of rows that the first router sends there."""
    within: Mapping[str, list[float]]
    """Feasibility of the first router, and of one that serves budgets without thresholds of this evaluation: per
    budget, the share of episodes that cost no more than it."""
    beyond_routes: Mapping[str, Sequence[str]]
    """Per router that may choose columns that are no routes: which. The oracle may not, so such a router can close more
    than the whole gap."""

    def to_json(self) -> dict[str, Any]:
        """Every estimate with its interval; null where a value is not finite."""
        record: dict[str, Any] = to_jsonable(asdict(self))
        return record


def compute_frontier(
    outcomes: OutcomeTable,
    routers: Mapping[str, RouteValues],
    budgets: Sequence[float],
    *,
    routes: Sequence[str],
    replicates: int = 1000,
    seed: int = 0,
    served: Mapping[str, Sequence[Floats]] | None = None,
    delivered: Floats | None = None,
) -> Frontier:
    """`routers` by name, the evaluated one first. `routes` are the outcome columns they choose from, the one without
    tools first; every other column becomes a fixed point. `served` are the probabilities [rows, routes] of routers
    that need no threshold, one table per budget; `delivered` those of the first router by the thresholds of its
    training."""
    _check_inputs(routers, budgets)
    kept = outcomes.complete_rows()
    complete = outcomes.select_rows(kept)
    weights = row_weights(len(complete.row_ids), replicates, seed)
    values = {name: router_values.select_rows(kept) for name, router_values in routers.items()}
    rows = {name: _RowMeans.of(complete, each.columns or routes, weights, seed) for name, each in values.items()}
    chosen = complete.select_routes(routes)
    references = _reference_curves(chosen, of_routes := _RowMeans.of(complete, routes, weights, seed))
    at_budgets = {name: [rows[name].at_budget(each, budget) for budget in budgets] for name, each in values.items()}
    trained = {
        name: rows[name].evaluate_mixture(_softmax(each.values)) for name, each in values.items() if each.samples
    }
    first, *others = at_budgets
    alone = {f"{name}{SAMPLED}": each for name, each in trained.items()}
    by_default = None if delivered is None else of_routes.evaluate_mixture(delivered[kept])
    if by_default is not None:
        alone[f"{first}{AS_DELIVERED}"] = by_default
    without_thresholds = {
        name: [of_routes.evaluate_mixture(mixture[kept]) for mixture in mixtures]
        for name, mixtures in (served or {}).items()
    }
    return Frontier(
        rows=len(complete.row_ids),
        left_out=len(outcomes.row_ids) - len(kept),
        draws=outcomes.scores.shape[2],
        curves={
            name: [_curve_point(curve, budget, len(weights)) for budget in budgets]
            for name, curve in references.items()
        }
        | {
            name: [_point(each.cost, each.score, budget) for each, budget in zip(results, budgets, strict=True)]
            for name, results in (at_budgets | without_thresholds).items()
        },
        fixed=_fixed_points(complete, routes, weights)
        | {name: _point(each.cost, each.score) for name, each in alone.items()},
        gap_closed={
            name: [estimate(_gap_closed(each, references)) for each in results] for name, results in at_budgets.items()
        },
        as_trained=_at_own_cost(trained.get(first), rows, values, references),
        as_delivered=_at_own_cost(by_default, rows, values, references),
        against_fixed=_against_fixed(complete, routes, rows[first], values[first]),
        at_its_cost={
            name: [estimate(curve.score_at(each.cost)) for each in at_budgets[first]]
            for name, curve in references.items()
        },
        ahead={name: _leads(at_budgets[first], at_budgets[name]) for name in others},
        shares=[dict(zip(routes, each.mixture.mean(axis=0).tolist(), strict=True)) for each in at_budgets[first]],
        within={
            name: [_share_within(chosen, each.mixture, budget) for each, budget in zip(results, budgets, strict=True)]
            for name, results in ({first: at_budgets[first]} | without_thresholds).items()
        },
        beyond_routes=_beyond(values, routes),
    )


def _beyond(values: Mapping[str, RouteValues], routes: Sequence[str]) -> dict[str, list[str]]:
    columns = {name: [column for column in each.columns or () if column not in routes] for name, each in values.items()}
    return {name: more for name, more in columns.items() if more}


def _check_inputs(routers: Mapping[str, RouteValues], budgets: Sequence[float]) -> None:
    if not budgets or any(not np.isfinite(b) or b < 0 for b in budgets):
        raise ConfigError(f"budgets are {list(budgets)}: give at least one, all finite and not negative")
    for name, router_values in routers.items():
        table = router_values.values  # −∞: the route does not apply to the row
        if np.isnan(table).any() or np.isposinf(table).any() or not np.isfinite(table).any(axis=1).all():
            raise ConfigError(f"{name} gives a value that is not finite: is its head damaged?")


def _share_within(outcomes: OutcomeTable, mixture: Floats, budget: float) -> float:
    feasible = (outcomes.costs <= budget + 1e-9).mean(axis=2)
    return float((mixture * feasible).sum(axis=1).mean())


@dataclass(frozen=True, slots=True)
class _MixtureResult:
    """Mean cost and score of a mixture of routes, [replicates] each."""

    mixture: Floats
    """[rows, routes]"""
    cost: Floats
    score: Floats


@dataclass(frozen=True, slots=True)
class _RowMeans:
    """Means over the draws, [rows, routes], and the bootstrap weights of the rows."""

    scores: Floats
    costs: Floats
    weights: Floats
    seed: int

    @classmethod
    def of(cls, outcomes: OutcomeTable, columns: Sequence[str], weights: Floats, seed: int) -> _RowMeans:
        chosen = outcomes.select_routes(columns)
        return cls(chosen.mean_over_draws("scores"), chosen.mean_over_draws("costs"), weights, seed)

    def evaluate_mixture(self, mixture: Floats) -> _MixtureResult:
        cost, score = ((mixture * values).sum(axis=1) for values in (self.costs, self.scores))
        return _MixtureResult(mixture, self.weights @ cost, self.weights @ score)

    def at_budget(self, router_values: RouteValues, budget: float) -> _MixtureResult:
        """Two-fold: each half is routed with the threshold fitted on the other. A single row uses its own."""
        count = len(self.costs)
        order = np.random.default_rng(self.seed).permutation(count)
        halves = [order[: count // 2], order[count // 2 :]] if count > 1 else [order, order]
        mixture = np.empty_like(self.costs)
        for evaluated, fitted in (halves, halves[::-1]):
            rows = router_values.select_rows(fitted)
            (threshold,), means = calibrate(rows, self.costs[fitted], self.scores[fitted], [budget])
            rows = router_values.select_rows(evaluated)
            mixture[evaluated] = threshold.probabilities(rows.values, rows.expected_costs(means))
        return self.evaluate_mixture(mixture)


def mean_score_at_budgets(
    outcomes: OutcomeTable,
    router_values: RouteValues,
    budgets: Sequence[float],
    *,
    routes: Sequence[str],
    seed: int = 0,
) -> float:
    """A router's score on these rows, averaged over the budgets; each half is routed with the other's thresholds."""
    kept = outcomes.complete_rows()
    weights = row_weights(len(kept), 0, seed)
    rows = _RowMeans.of(outcomes.select_rows(kept), router_values.columns or routes, weights, seed)
    values = router_values.select_rows(kept)
    return float(np.mean([rows.at_budget(values, budget).score[0] for budget in budgets]))


def _at_own_cost(
    result: _MixtureResult | None,
    rows: Mapping[str, _RowMeans],
    values: Mapping[str, RouteValues],
    references: Mapping[str, Curve],
) -> dict[str, Estimate]:
    """The first router where no threshold of the evaluation routes; see `Frontier.as_trained`."""
    if result is None:
        return {}
    _, *others = values
    estimates = {"gap_closed": estimate(_gap_closed(result, references))}
    estimates |= {name: estimate(curve.score_at(result.cost)) for name, curve in references.items()}
    for name in others:
        other = rows[name].at_budget(values[name], float(result.cost[0]))
        estimates |= {
            name: estimate(other.score),
            f"{name}, cost": estimate(other.cost),
            f"ahead of {name}": estimate(result.score - other.score),
        }
    return estimates


def calibrate(
    router_values: RouteValues, spent: Floats, scores: Floats, budgets: Sequence[float]
) -> tuple[list[Threshold], Floats]:
    """Thresholds to store with a checkpoint, fitted on all rows, and the mean cost of each route on them.

    `spent` and `scores` [rows, routes] are the actual costs and scores, averaged over each row's draws.
    """
    means = spent.mean(axis=0)
    costs = router_values.expected_costs(means)
    return [find_threshold(router_values.values, costs, spent, budget, scores) for budget in budgets], means


def _softmax(logits: Floats) -> Floats:
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def _point(cost: Floats, score: Floats, budget: float | None = None) -> Point:
    return Point(budget, estimate(cost), estimate(score))


def _curve_point(curve: Curve, budget: float, replicates: int) -> Point:
    costs = np.full(replicates, budget)
    return _point(curve.clip_cost(costs), curve.score_at(costs), budget)


def _reference_curves(chosen: OutcomeTable, rows: _RowMeans) -> dict[str, Curve]:
    scores, costs, weights = rows.scores, rows.costs, rows.weights
    curves = {
        "random": random_curve(scores, costs, weights, free=0),
        "best fixed mixture": fixed_mixture_curve(scores, costs, weights),
        "oracle": oracle_curve(scores, costs, weights),
    }
    half = chosen.scores.shape[2] // 2
    if half:
        halves = chosen.select_draws(slice(0, half)), chosen.select_draws(slice(half, None))
        parts = [part.mean_over_draws(what) for part in halves for what in ("scores", "costs")]
        if all(np.isfinite(part).all() for part in parts):
            curves["oracle, held-out draws"] = oracle_curve(
                parts[0], parts[1], weights, paid_scores=parts[2], paid_costs=parts[3]
            )
    return curves


def _fixed_points(outcomes: OutcomeTable, routes: Sequence[str], weights: Floats) -> dict[str, Point]:
    """Every outcome column on its own."""
    scores, costs = weights @ outcomes.mean_over_draws("scores"), weights @ outcomes.mean_over_draws("costs")
    return {
        (f"always {name}" if name in routes else name): _point(costs[:, i], scores[:, i])
        for i, name in enumerate(outcomes.routes)
    }


def _leads(own: Sequence[_MixtureResult], other: Sequence[_MixtureResult]) -> list[Estimate]:
    return [estimate(mine.score - theirs.score) for mine, theirs in zip(own, other, strict=True)]


def _against_fixed(
    outcomes: OutcomeTable, routes: Sequence[str], rows: _RowMeans, values: RouteValues
) -> dict[str, dict[str, Estimate]]:
    found = {}
    for name in outcomes.routes:
        if name not in routes:
            column = outcomes.select_routes([name])
            score, cost = (rows.weights @ column.mean_over_draws(what)[:, 0] for what in ("scores", "costs"))
            own = rows.at_budget(values, float(cost[0]))
            found[name] = {
                "score": estimate(own.score),
                "cost": estimate(own.cost),
                "ahead": estimate(own.score - score),
                "costs more by": estimate(own.cost - cost),
            }
    return found


def _gap_closed(result: _MixtureResult, references: Mapping[str, Curve]) -> Floats:
    """NaN where there is no gap to close."""
    low, high = references["random"].score_at(result.cost), references["oracle"].score_at(result.cost)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(high - low > 1e-9, (result.score - low) / (high - low), np.nan)
