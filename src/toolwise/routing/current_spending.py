"""What the router as it is now would spend on prompts that an older version of it routed, for the dual variables of
asynchronous training.

    stratified routes   Σ_route π(route) · mean cost of its rollouts, per prompt
    sampled routes      the cost of each rollout, weighted by min(π / μ, 2), normalised: μ sampled the route, or all
                        routes of the rollout's turns
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from toolwise.routing.route_advantages import RouteOutcome, RouteProbs, policy_weights
from toolwise.routing.samples import RoutePrediction, RoutePredictor

MAX_WEIGHT = 2.0


def current_prediction(
    model: RoutePredictor, prediction: RoutePrediction, multipliers: Sequence[float]
) -> RoutePrediction:
    """The prediction of the same prompt by the head as it is now."""
    prompt, features = prediction.head_inputs
    if features is None:
        [now] = model.predict([prompt], multipliers)
    else:
        now = model.predict_encoded(prompt, features, multipliers)
    return now.at(prediction.bin).restricted(prediction.applicable)


def current_costs(
    outcomes: Sequence[RouteOutcome], sampled_from: RouteProbs, now: RouteProbs, sampling: str, units: Sequence[str]
) -> dict[str, list[float]]:
    """unit -> what is spent: per prompt for stratified routes, per rollout for sampled ones."""
    if sampling == "stratified":
        known = {c.prompt_id: now[c.prompt_id] for c in outcomes}
        weights = policy_weights(outcomes, known, sampling)
        found: dict[str, dict[str, float]] = {unit: dict.fromkeys(known, 0.0) for unit in units}
        for outcome, weight in zip(outcomes, weights, strict=True):
            for unit in units:
                found[unit][outcome.prompt_id] += weight * outcome.costs[unit]
        return {unit: list(by_prompt.values()) for unit, by_prompt in found.items()}
    logs = [_log(now[c.prompt_id][c.route]) - _log(sampled_from[c.prompt_id][c.route]) for c in outcomes]
    return weighted_costs([c.costs for c in outcomes], logs, units)


def weighted_costs(
    costs: Sequence[Mapping[str, float]], log_ratios: Sequence[float], units: Sequence[str]
) -> dict[str, list[float]]:
    """Costs of rollouts, weighted by the truncated ratios of probabilities, whose mean is made 1."""
    ratios = [math.exp(min(log, math.log(MAX_WEIGHT))) for log in log_ratios]
    mean = math.fsum(ratios) / max(1, len(ratios))
    weights = [ratio / mean for ratio in ratios] if mean > 0 else [1.0] * len(ratios)
    return {unit: [w * c[unit] for w, c in zip(weights, costs, strict=True)] for unit in units}


def _log(probability: float) -> float:
    return math.log(max(probability, 1e-30))
