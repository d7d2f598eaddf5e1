"""The calibration that makes a trained router deliver its budgets: thresholds fitted on tasks it never learned from.

All calibration tasks get a prediction of the head, some of them a rollout under every route. A task without rollouts
counts with the costs that a regression on the head's output gives its routes, and tasks with rollouts correct the
regression's error (the regression estimator of survey sampling): what varies most between prompts is their route, and a
prediction is enough to know it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from toolwise.errors import CheckpointError
from toolwise.messages import Message
from toolwise.routing.delivered_budget import DeliveredBudget, check_numbers, reason_of
from toolwise.routing.head import ROUTER_METADATA_FILE
from toolwise.routing.joint_threshold import JointThreshold, fit_joint_threshold
from toolwise.routing.samples import RoutePrediction
from toolwise.routing.threshold import Floats, Ints

KEY = "trained_budget"
"""Of the head's metadata and of the router's state."""
MIN_ROWS_PER_FEATURE = 8
"""Rows with rollouts that a regression needs for each of its coefficients."""
_NEARBY = (0.8, 1.2)
"""The budgets, as a share of the trained ones, between which the score's slope is measured."""


@dataclass(frozen=True, kw_only=True)
class BudgetCalibration(DeliveredBudget):
    """How to choose routes so that the trained budgets hold; `rolled_out` tasks have a rollout under every route."""

    threshold: JointThreshold
    route_costs: tuple[tuple[float, ...], ...]
    """Mean costs of each route, by unit; used if the head does not predict costs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for values in (*self.threshold.charges, *self.threshold.bonuses, *self.route_costs):
            if len(values) != len(self.units):
                raise ValueError("its charges and route costs are not one per unit")
        check_numbers("its route costs", *chain(*self.route_costs))

    def route(self, prediction: RoutePrediction, prompt: Sequence[Message]) -> int:
        """The route of one prompt: always the same for the same prompt."""
        values, costs = values_and_costs(prediction)
        expected = np.asarray(self.route_costs) if costs is None else costs
        return self.threshold.route(values, expected, partial(prompt_uniform, prompt))

    def probabilities(self, prediction: RoutePrediction) -> Floats:
        """[routes] over the lots that prompts may draw."""
        values, costs = values_and_costs(prediction)
        expected = np.asarray(self.route_costs) if costs is None else costs
        return np.asarray(self.threshold.probabilities(values[None], expected[None])[0])


def read_budget_calibration(metadata: Mapping[str, Any], limits: Mapping[str, float]) -> BudgetCalibration | None:
    """The calibration in a head's metadata or a router's state; None if there is none, or for other budgets than
    `limits`."""
    if metadata.get(KEY) is None:
        return None
    calibration = read_calibration(metadata[KEY])
    same = dict(zip(calibration.units, calibration.limits, strict=True)) == dict(limits)
    return calibration if same else None


def read_calibration(stored: Any) -> BudgetCalibration:
    try:
        return TypeAdapter(BudgetCalibration).validate_python(stored)
    except ValidationError as fault:
        raise CheckpointError(
            f"{ROUTER_METADATA_FILE} holds a budget calibration that cannot be read ({reason_of(fault)}): use "
            "another checkpoint"
        ) from None


def prompt_uniform(prompt: Sequence[Message], salt: str = "") -> float:
    """A number in [0, 1) from a hash of the messages alone, so that a prompt always draws the same lot."""
    text = json.dumps([message.to_openai() for message in prompt], sort_keys=True)
    digest = hashlib.sha256(f"{salt}\n{text}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / (1 << 53)


def values_and_costs(prediction: RoutePrediction) -> tuple[Floats, Floats | None]:
    """Inputs of a threshold: predicted rewards [routes] and costs [routes, units], or log-probs and None. Of a route
    that does not apply, the first is −∞."""
    if prediction.rewards is None or prediction.costs is None or not prediction.costs[0]:
        return np.asarray(prediction.logprobs), None
    mask = prediction.applicable or (True,) * len(prediction.rewards)
    return np.where(mask, prediction.rewards, -np.inf), np.asarray(prediction.costs)


@dataclass(frozen=True)
class CalibrationTable:
    """What is known about the calibration tasks."""

    values: Floats
    """[rows, routes]"""
    predicted: Floats | None
    """[rows, routes, units]; None if the head predicts no costs."""
    rolled_out: Ints
    """Rows with a scored rollout under every route that applies to them, at least one."""
    spent: Floats
    """[rolled out, routes, units]; 0 for a route that does not apply."""
    scores: Floats
    """[rolled out, routes]"""

    @cached_property
    def applies(self) -> NDArray[np.bool_]:
        """[rows, routes] which routes the rows can take; `values` of the others are −∞."""
        return np.isfinite(self.values)

    @cached_property
    def route_costs(self) -> Floats:
        """Mean over the rows that a route applies to; 0 if it applies to none of those with rollouts."""
        if self.applies.all():
            return np.asarray(self.spent.mean(axis=0))
        tried = self.applies[self.rolled_out]
        return np.asarray(self.spent.sum(axis=0) / np.maximum(tried.sum(axis=0), 1)[:, None])

    @cached_property
    def expected(self) -> Floats:
        """[rows, routes, units]"""
        shape = (*self.values.shape, self.spent.shape[2])
        return np.broadcast_to(self.route_costs, shape) if self.predicted is None else self.predicted

    @cached_property
    def imputed(self) -> Floats:
        """What the routes of every row would cost, [rows, routes, units]: as predicted, or by a regression on the
        probabilities of the routes. A route costs more on the prompts it is chosen for than on others."""
        if self.predicted is not None:
            return self.predicted
        if len(self.rolled_out) < MIN_ROWS_PER_FEATURE * self.values.shape[1]:
            return self.expected
        odds = np.exp(self.values - self.values.max(axis=1, keepdims=True))
        odds /= odds.sum(axis=1, keepdims=True)
        features = np.column_stack([np.ones(len(odds)), odds[:, 1:]])
        flat = self.spent.reshape(len(self.rolled_out), -1)
        if self.applies.all():
            weights, *_ = np.linalg.lstsq(features[self.rolled_out], flat, rcond=1e-6)
            return np.asarray((features @ weights).reshape(self.expected.shape))
        return self._imputed_by_route(features)

    def _imputed_by_route(self, features: Floats) -> Floats:
        """The same regression for each route on the rows that it applies to, where they are enough."""
        costs = np.array(self.expected)
        for route in range(self.values.shape[1]):
            tried = np.flatnonzero(self.applies[self.rolled_out, route])
            if len(tried) >= MIN_ROWS_PER_FEATURE * self.values.shape[1]:
                seen = features[self.rolled_out[tried]]
                weights, *_ = np.linalg.lstsq(seen, self.spent[tried, route], rcond=1e-6)
                costs[:, route] = features @ weights
        return costs

    @cached_property
    def corrected(self) -> Floats:
        """Imputed costs plus, on rows with rollouts, what these cost beyond that, which stands for all rows."""
        costs = np.array(self.imputed)
        weight = len(self.values) / len(self.rolled_out)
        costs[self.rolled_out] += weight * (self.spent - costs[self.rolled_out])
        return costs

    def mean_costs(self, mixture: Floats) -> Floats:
        """Of a policy [rows, routes], by unit."""
        return np.asarray((mixture[:, :, None] * self.corrected).sum(axis=1).mean(axis=0))

    def standard_errors(self, mixture: Floats) -> Floats:
        """Of `mean_costs`: from the choice of the rows, and from the choice of those with rollouts."""
        rows, count = len(self.values), len(self.rolled_out)
        chosen = mixture[self.rolled_out][:, :, None]
        spent = (chosen * self.spent).sum(axis=1)
        surplus = spent - (chosen * self.imputed[self.rolled_out]).sum(axis=1)
        # At least 0: without a lottery the difference is a rounding error.
        lottery = np.maximum((chosen * self.spent**2).sum(axis=1) - spent**2, 0.0)
        ddof = min(self.values.shape[1], count - 1)
        variance = (spent.var(axis=0, ddof=min(1, ddof)) + lottery.mean(axis=0)) / rows
        return np.asarray(np.sqrt(variance + (1 / count - 1 / rows) * surplus.var(axis=0, ddof=ddof)))

    def mean_scores(self, mixture: Floats) -> Floats:
        """Expected score of each row with rollouts."""
        return np.asarray((mixture[self.rolled_out] * self.scores).sum(axis=1))


def calibrate_budgets(table: CalibrationTable, limits: Mapping[str, float], *, step: int = 0) -> BudgetCalibration:
    threshold, mixture = _fit(table, list(limits.values()))
    costs, scores = table.mean_costs(mixture), table.mean_scores(mixture)
    cheapest = [
        np.take_along_axis(table.corrected[:, :, u], _cheapest(table, u)[:, None], 1).mean() for u in range(len(limits))
    ]
    return BudgetCalibration(
        units=tuple(limits),
        limits=tuple(limits.values()),
        threshold=threshold,
        route_costs=tuple(tuple(costs) for costs in table.route_costs.tolist()),
        rows=len(table.values),
        rolled_out=len(table.rolled_out),
        costs=tuple(costs.tolist()),
        standard_errors=tuple(table.standard_errors(mixture).tolist()),
        score=float(scores.mean()),
        slope=_slope(table, limits),
        least=tuple(map(float, cheapest)),
        step=step,
    )


def _cheapest(table: CalibrationTable, unit: int) -> Ints:
    """The cheapest route of each row."""
    return np.asarray(np.where(table.applies, table.expected[:, :, unit], np.inf).argmin(axis=1), dtype=np.int64)


def _fit(table: CalibrationTable, limits: Sequence[float]) -> tuple[JointThreshold, Floats]:
    """The threshold and its policy. Budgets that the head's best routes leave over are spent only if the scores on the
    calibration tasks rise by more than their standard error."""
    values, expected, corrected = table.values, table.expected, table.corrected
    tight = fit_joint_threshold(values, expected, corrected, limits, loosen=False)
    loose = fit_joint_threshold(values, expected, corrected, limits, loosen=True)
    mixtures = [threshold.probabilities(values, expected) for threshold in (tight, loose)]
    gain = table.mean_scores(mixtures[1]) - table.mean_scores(mixtures[0])
    if loose == tight or not gain.mean() > gain.std() / math.sqrt(len(gain)):
        return tight, mixtures[0]
    return loose, mixtures[1]


def _slope(table: CalibrationTable, limits: Mapping[str, float]) -> float:
    points = []
    for factor in _NEARBY:
        _, mixture = _fit(table, [factor * limit for limit in limits.values()])
        points.append((spending(table.mean_costs(mixture).tolist(), limits), float(table.mean_scores(mixture).mean())))
    (low, low_score), (high, high_score) = points
    return max(0.0, (high_score - low_score) / (high - low)) if high - low > 1e-6 else 0.0


def spending(costs: Sequence[float], limits: Mapping[str, float]) -> float:
    """The largest of cost ÷ limit; budgets of 0 are left out."""
    return max((cost / limit for cost, limit in zip(costs, limits.values(), strict=True) if limit > 0), default=0.0)
