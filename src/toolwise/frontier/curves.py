"""Score-against-cost curves of the oracle and of routers that do not look at the prompt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from toolwise.routing.threshold import Floats, hull_moves


@dataclass(frozen=True, slots=True)
class Curve:
    """Piecewise linear curves, one per bootstrap replicate: [replicates, corners], with increasing costs."""

    costs: Floats
    scores: Floats

    def score_at(self, costs: Floats) -> Floats:
        """The score at each replicate's own cost [replicates]; constant beyond the two ends."""
        curves = zip(costs, self.costs, self.scores, strict=True)
        return np.array([np.interp(cost, xs, ys) for cost, xs, ys in curves])

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
    lines = [_hull_line(xs, ys) for xs, ys in zip(mean_costs, mean_scores, strict=True)]
    longest = max(len(xs) for xs, _ in lines)
    padded = [(_pad(xs, longest), _pad(ys, longest)) for xs, ys in lines]
    return Curve(np.stack([xs for xs, _ in padded]), np.stack([ys for _, ys in padded]))


def _hull_line(costs: Floats, scores: Floats) -> tuple[list[float], list[float]]:
    moves = hull_moves(scores[None, :], costs[None, :])
    corners = [int(moves.first[0]), *(int(route) for route in moves.after[moves.slope > 0])]
    return [float(costs[c]) for c in corners], [float(scores[c]) for c in corners]


def _pad(line: list[float], length: int) -> list[float]:
    return line + [line[-1]] * (length - len(line))
