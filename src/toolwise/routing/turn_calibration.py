"""The calibration of a router that chooses at every turn: a shift of its logits, found by bisection on rollouts.

    route(turn) = argmax_a  log π(a | conversation) − θ·w_a        w_a: how much route a can spend in a turn, at most 1

What a shift costs is only known by rolling out: it changes which turns follow. So tasks that were never learned from
are rolled out under a few values of θ, on the policy that each of them makes, until two enclose the budget. Prompts
then draw one of the two, by a hash, such that the mean cost meets it.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from toolwise.errors import CheckpointError
from toolwise.messages import Message
from toolwise.routing.calibration import prompt_uniform
from toolwise.routing.delivered_budget import DeliveredBudget, check_numbers, check_shares, reason_of
from toolwise.routing.head import ROUTER_METADATA_FILE
from toolwise.routing.samples import RoutePrediction
from toolwise.routing.threshold import Floats

KEY = "turn_budget"
"""Of the head's metadata and of the router's state."""
FIRST_SHIFT, GROWTH, LARGEST_SHIFT = 1.0, 4.0, 64.0
"""Shifts are tried at 1, 4, 16 and 64 nats until one lies on the other side of the budget."""
_TIE = 1e-9


@dataclass(frozen=True, kw_only=True)
class TurnCalibration(DeliveredBudget):
    """How to choose the routes of turns so that a trained budget holds."""

    shifts: tuple[float, float]
    """θ that spends more than the budget, and θ that does not."""
    share: float
    """Share of the prompts that use the first one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers("its shifts", *self.shifts)
        check_shares((self.share, 1.0 - self.share))

    def route(self, prediction: RoutePrediction, weights: Sequence[float], prompt: Sequence[Message], turn: int) -> int:
        """The route of one turn: always the same for the same conversation."""
        shift = self.shifts[0] if prompt_uniform(prompt, "turns") < self.share else self.shifts[1]
        return shifted_route(prediction, weights, shift, prompt, turn)


def shifted_route(
    prediction: RoutePrediction, weights: Sequence[float], shift: float, prompt: Sequence[Message], turn: int
) -> int:
    """The best route after the shift; of equals, one by a hash of the prompt and the turn."""
    values = [logprob - shift * weight for logprob, weight in zip(prediction.logprobs, weights, strict=True)]
    best = max(values)
    equals = [index for index, value in enumerate(values) if value >= best - _TIE]
    return equals[int(prompt_uniform(prompt, f"turn {turn}") * len(equals))] if len(equals) > 1 else equals[0]


def read_turn_calibration(metadata: Mapping[str, Any], limits: Mapping[str, float]) -> TurnCalibration | None:
    """The calibration in a head's metadata or a router's state; None if there is none, or for another budget."""
    if metadata.get(KEY) is None:
        return None
    try:
        calibration = TypeAdapter(TurnCalibration).validate_python(metadata[KEY])
    except ValidationError as fault:
        raise CheckpointError(
            f"{ROUTER_METADATA_FILE} holds a calibration of turns that cannot be read ({reason_of(fault)}): "
            "use another checkpoint"
        ) from None
    same = dict(zip(calibration.units, calibration.limits, strict=True)) == dict(limits)
    return calibration if same else None


@dataclass(frozen=True)
class CalibrationPass:
    """All calibration tasks, rolled out under one shift."""

    shift: float
    costs: Floats
    """[tasks]"""
    scores: Floats
    """[tasks]; NaN where the rollout failed, whose cost does not count either."""

    @property
    def usable(self) -> Any:
        return np.isfinite(self.scores)

    @property
    def cost(self) -> float:
        return float(self.costs[self.usable].mean())

    @property
    def score(self) -> float:
        return float(self.scores[self.usable].mean())


Measure = Callable[[float], Awaitable[CalibrationPass | None]]
"""Rolls out the calibration tasks under a shift; None if no rollout could be used."""


async def bisect_shift(measure: Measure, limit: float, *, passes: int) -> list[CalibrationPass]:
    """At most `passes` passes: without a shift first, then on the side of the budget, then between the two nearest to
    it. Empty if nothing could be measured."""
    first = await measure(0.0)
    if first is None:
        return []
    done = [first]
    sign = 1.0 if first.cost > limit else -1.0
    shift = FIRST_SHIFT
    while first.cost != limit and len(done) < passes and shift <= LARGEST_SHIFT:
        latest = await measure(sign * shift)
        if latest is None:
            return done
        done.append(latest)
        if (latest.cost > limit) != (first.cost > limit):
            break
        shift *= GROWTH
    while len(done) < passes and (bounds := _bounds(done, limit)) is not None:
        over, under = bounds
        if over.cost == limit or under.cost == limit or over.cost == under.cost:
            break
        latest = await measure((over.shift + under.shift) / 2)
        if latest is None:
            break
        done.append(latest)
    return done


def _bounds(passes: Sequence[CalibrationPass], limit: float) -> tuple[CalibrationPass, CalibrationPass] | None:
    """The passes next to the budget: the tightest that exceeds it, and the loosest beyond that which does not."""
    over = max((p for p in passes if p.cost > limit), key=lambda p: p.shift, default=None)
    if over is None:
        return None
    under = min((p for p in passes if p.cost <= limit and p.shift > over.shift), key=lambda p: p.shift, default=None)
    return None if under is None else (over, under)


def calibrate_turns(
    passes: Sequence[CalibrationPass], unit: str, limit: float, *, rows: int, step: int = 0
) -> TurnCalibration:
    """The shifts that deliver the budget. A budget that the unshifted router leaves over is spent only if the scores
    rise by more than their standard error."""
    first, cheapest = passes[0], min(passes, key=lambda p: p.cost)
    chosen = _mixture(passes, limit)
    if first.cost <= limit and chosen is not None and not _gains(first, *chosen):
        chosen = first, first, 0.0
    over, under, share = chosen if chosen is not None else (first, first, 0.0)
    if chosen is None and first.cost > limit:  # no shift meets the budget
        over, under = cheapest, cheapest
    usable = over.usable & under.usable
    pairs = [(share, over), (1.0 - share, under)]
    mean = sum(weight * float(p.costs[usable].mean()) for weight, p in pairs)
    square = sum(weight * float((p.costs[usable] ** 2).mean()) for weight, p in pairs)
    return TurnCalibration(
        units=(unit,),
        limits=(limit,),
        rows=rows,
        rolled_out=int(usable.sum()),
        costs=(min(mean, limit) if chosen is not None and math.isclose(mean, limit, abs_tol=1e-9) else mean,),
        standard_errors=(math.sqrt(max(0.0, square - mean**2) / max(1, int(usable.sum()) - 1)),),
        score=sum(weight * float(p.scores[usable].mean()) for weight, p in pairs),
        slope=_slope(passes, limit),
        least=(cheapest.cost,),
        step=step,
        shifts=(over.shift, under.shift),
        share=share,
    )


def _mixture(passes: Sequence[CalibrationPass], limit: float) -> tuple[CalibrationPass, CalibrationPass, float] | None:
    """Two passes, and the share of the first whose mean cost meets the budget. None if every pass exceeds it; if none
    does, the one that spends most."""
    if (bounds := _bounds(passes, limit)) is None:
        within = [p for p in passes if p.cost <= limit]
        most = max(within, key=lambda p: (p.cost, p.shift), default=None)
        return None if most is None else (most, most, 0.0)
    over, under = bounds
    usable = over.usable & under.usable
    if not usable.any():  # nothing to compare them by: the one that is within the budget
        return under, under, 0.0
    high, low = float(over.costs[usable].mean()), float(under.costs[usable].mean())
    share = (limit - low) / (high - low) if high > low else 0.0
    return over, under, min(max(share, 0.0), 1.0)


def _gains(first: CalibrationPass, over: CalibrationPass, under: CalibrationPass, share: float) -> bool:
    """Whether a mixture scores better than `first` by more than the standard error of the difference."""
    usable = first.usable & over.usable & under.usable
    gains = (share * over.scores + (1.0 - share) * under.scores - first.scores)[usable]
    return len(gains) > 1 and float(gains.mean()) > float(gains.std(ddof=1)) / math.sqrt(len(gains))


def _slope(passes: Sequence[CalibrationPass], limit: float) -> float:
    """By a straight line through all passes; at least 0."""
    costs = np.array([p.cost / limit if limit else 0.0 for p in passes])
    if float(np.ptp(costs)) < 1e-6:
        return 0.0
    return max(0.0, float(np.polyfit(costs, [p.score for p in passes], 1)[0]))
