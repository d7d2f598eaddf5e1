"""Score-against-cost curves of the oracle and of routers that do not look at the prompt, with a bootstrap over rows.

All curves of a frontier are resampled with the same weights, so differences are paired.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toolwise.routing.threshold import Floats, hull_moves


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its confidence interval."""

    value: float
    low: float
    high: float


def row_weights(rows: int, replicates: int, seed: int) -> Floats:
    """[1 + replicates, rows], each line sums to 1. The first is the original sample: every row once."""
    counts = np.random.default_rng(seed).multinomial(rows, np.full(rows, 1 / rows), size=replicates)
    return np.concatenate([np.ones((1, rows)), counts]) / rows


def estimate(samples: Floats, level: float = 0.95) -> Estimate:
    """`samples[0]` is the statistic of the original sample, the rest are its bootstrap replicates."""
    tail = 100 * (1 - level) / 2
    resampled = samples[1:] if len(samples) > 1 else samples
    finite = resampled[np.isfinite(resampled)]
    low, high = np.percentile(finite, [tail, 100 - tail]) if len(finite) else (np.nan, np.nan)
    return Estimate(float(samples[0]), float(low), float(high))


@dataclass(frozen=True, slots=True)
class Curve:
    """Piecewise linear curves, one per bootstrap replicate: [replicates, corners], with increasing costs."""

    costs: Floats
    scores: Floats

    def score_at(self, costs: Floats) -> Floats:
        """The score at each replicate's own cost [replicates]; constant beyond the two ends."""
        return np.array([np.interp(*curve) for curve in zip(costs, self.costs, self.scores, strict=True)])

    def clip_cost(self, costs: Floats) -> Floats:
        """What is actually spent under a budget: the cost, clipped to the ends of the curve."""
        return np.clip(costs, self.costs[:, 0], self.costs[:, -1])


def oracle_curve(
    scores: Floats,
    costs: Floats,
    weights: Floats,
    *,
    paid_scores: Floats | None = None,
    paid_costs: Floats | None = None,
) -> Curve:
    """The best use of every budget if each row's expected score under each route were known.

    A fractional knapsack: rows start at their cheapest route and move along their hulls, the steepest move of all rows
    first; moves that gain nothing are skipped. With `paid_scores` and `paid_costs`, routes are still chosen by `scores`
    and `costs` but evaluated on these other draws of the same rows, so that luck does not count as knowledge.
    """
    moves = hull_moves(scores, costs)
    gains = moves.slope > 0
    row, before, after = moves.row[gains], moves.before[gains], moves.after[gains]
    lines = []
    for paid in (costs if paid_costs is None else paid_costs, scores if paid_scores is None else paid_scores):
        start = weights @ paid[np.arange(len(paid)), moves.first]
        steps = weights[:, row] * (paid[row, after] - paid[row, before])
        lines.append(np.concatenate([start[:, None], start[:, None] + np.cumsum(steps, axis=1)], axis=1))
    return Curve(np.maximum.accumulate(lines[0], axis=1), lines[1])


def random_curve(scores: Floats, costs: Floats, weights: Floats, free: int) -> Curve:
    """Random routes: route `free`, or one of the others with equal probability; more of the others costs more."""
    mean_costs, mean_scores = weights @ costs, weights @ scores
    others = [route for route in range(scores.shape[1]) if route != free]
    ends = [(line[:, free], line[:, others].mean(axis=1)) for line in (mean_costs, mean_scores)]
    return Curve(np.stack(ends[0], axis=1), np.stack(ends[1], axis=1))


def fixed_mixture_curve(scores: Floats, costs: Floats, weights: Floats) -> Curve:
    """The best mixture of routes that is the same for every prompt: the upper hull of the routes' points."""
    mean_costs, mean_scores = weights @ costs, weights @ scores
    corners = []
    for line_scores, line_costs in zip(mean_scores, mean_costs, strict=True):
        moves = hull_moves(line_scores[None, :], line_costs[None, :])
        corners.append([int(moves.first[0]), *moves.after[moves.slope > 0].tolist()])
    longest = max(map(len, corners))
    routes = np.array([line + line[-1:] * (longest - len(line)) for line in corners])
    return Curve(np.take_along_axis(mean_costs, routes, 1), np.take_along_axis(mean_scores, routes, 1))


def describe_unmet(levels: Sequence[float], costs: Floats, applies: NDArray[np.bool_]) -> list[str]:
    """A note about budgets below what the cheapest routes cost. `costs` are [rows, routes]; `applies` says which of
    the routes the rows can take."""
    least = float(np.where(applies, costs, np.inf).min(axis=1).mean())
    unmet = ", ".join(f"{level:g}" for level in levels if level < least - 1e-9)
    return [f"budgets that no routes meet here: {unmet}; the cheapest routes cost {least:.3g}"] if unmet else []
