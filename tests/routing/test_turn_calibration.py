"""The shift that delivers a budget: bisection over made-up rollouts, and the routes it gives."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from toolwise.errors import CheckpointError
from toolwise.messages import Message
from toolwise.routing.samples import RoutePrediction
from toolwise.routing.turn_calibration import (
    KEY,
    CalibrationPass,
    TurnCalibration,
    bisect_shift,
    calibrate_turns,
    read_turn_calibration,
    shifted_route,
)

TASKS = 200
WORTH = np.linspace(-5, 5, TASKS)
"""How much a task's tool route is preferred, in nats."""


def calibrated(
    limit: float, *, passes: int = 8, gain: float = 1.0, price: float = 1.0, preference: float = 0.0
) -> tuple[TurnCalibration, list[float]]:
    """Tasks that call a tool if they prefer it to the shift; a call is worth `gain`."""
    tried: list[float] = []

    async def measure(shift: float) -> CalibrationPass:
        tried.append(shift)
        calls = (WORTH + preference > shift).astype(float)
        return CalibrationPass(shift, price * calls, gain * calls)

    done = asyncio.run(bisect_shift(measure, limit, passes=passes))
    return calibrate_turns(done, "cost", limit, rows=TASKS, step=3), tried


def test_bisection_meets_a_budget_that_the_router_exceeds() -> None:
    found, tried = calibrated(0.2)
    assert len(tried) <= 8
    assert found.costs == (pytest.approx(0.2),)
    assert found.feasible
    assert found.shifts[0] <= 3.0 <= found.shifts[1]
    assert found.score == pytest.approx(0.2)
    assert 0.0 < found.standard_errors[0] < 0.04
    assert found.slope > 0
    assert (found.rows, found.rolled_out, found.step) == (TASKS, TASKS, 3)


def test_a_budget_that_is_left_over_is_spent_if_the_score_rises() -> None:
    found, _ = calibrated(0.7)
    assert found.costs == (pytest.approx(0.7),)
    assert found.shifts[0] < 0


def test_a_budget_that_is_left_over_stays_if_calls_are_useless() -> None:
    found, _ = calibrated(0.7, gain=0.0)
    assert found.shifts == (0.0, 0.0)
    assert found.costs == (0.5,)


def test_a_budget_that_nothing_spends_leaves_the_loosest_shift() -> None:
    found, _ = calibrated(2.0)
    assert found.costs == (1.0,)
    assert found.feasible


def test_a_budget_that_nothing_meets_is_infeasible() -> None:
    found, _ = calibrated(0.0, preference=math.inf)
    assert not found.feasible
    assert found.least == (1.0,)


def test_the_number_of_passes_is_bounded() -> None:
    assert len(calibrated(0.2, passes=3)[1]) == 3
    assert len(calibrated(0.0, preference=math.inf)[1]) <= 8


def test_rollouts_that_failed_do_not_count() -> None:
    costs, scores = np.array([1.0, 0.0, 5.0]), np.array([1.0, 0.0, math.nan])
    found = calibrate_turns([CalibrationPass(0.0, costs, scores)], "cost", 0.5, rows=3)
    assert (found.costs, found.rolled_out) == ((0.5,), 2)


def test_nothing_measured_gives_no_passes() -> None:
    async def measure(shift: float) -> None:
        return None

    assert asyncio.run(bisect_shift(measure, 0.5, passes=4)) == []


PROMPT = [Message(role="user", content="What is 3 + 4?")]


def prompts(count: int = 300) -> list[list[Message]]:
    return [[Message(role="user", content=f"What is {n} + 4?")] for n in range(count)]


def test_a_shift_moves_turns_to_routes_that_cannot_spend() -> None:
    prediction = RoutePrediction((math.log(0.2), math.log(0.5), math.log(0.3)))
    routes = [shifted_route(prediction, (0.0, 1.0, 0.5), shift, PROMPT, 0) for shift in (0.0, 0.6, 1.2, -9.0)]
    assert routes == [1, 1, 0, 1]


def test_a_route_that_does_not_apply_is_never_chosen() -> None:
    prediction = RoutePrediction((math.log(0.5), math.log(0.5))).restricted((True, False))
    assert shifted_route(prediction, (0.0, 1.0), -64.0, PROMPT, 0) == 0


def test_ties_are_broken_by_the_prompt_and_the_turn() -> None:
    equal = RoutePrediction((math.log(0.5),) * 2)

    def share(route: Callable[[list[Message]], int]) -> float:
        return sum(map(route, prompts())) / 300

    assert 0.4 < share(lambda prompt: shifted_route(equal, (0.0, 0.0), 1.0, prompt, 0)) < 0.6
    assert shifted_route(equal, (0.0, 0.0), 1.0, PROMPT, 0) == shifted_route(equal, (0.0, 0.0), 2.0, PROMPT, 0)
    assert len({shifted_route(equal, (0.0, 0.0), 1.0, PROMPT, turn) for turn in range(20)}) == 2


def test_prompts_draw_one_of_two_shifts_for_all_their_turns() -> None:
    found = make(shifts=(0.0, 9.0), share=0.25)
    prediction = RoutePrediction((math.log(0.4), math.log(0.6)))
    first = [found.route(prediction, (0.0, 1.0), prompt, 0) for prompt in prompts()]
    assert 0.18 < sum(first) / 300 < 0.32
    assert first == [found.route(prediction, (0.0, 1.0), prompt, 1) for prompt in prompts()]


def make(**changes: object) -> TurnCalibration:
    fields: dict[str, object] = {
        "units": ("cost",),
        "limits": (0.5,),
        "rows": 10,
        "rolled_out": 10,
        "costs": (0.5,),
        "standard_errors": (0.1,),
        "score": 1.0,
        "shifts": (0.5, 1.0),
        "share": 0.3,
    }
    return TurnCalibration(**(fields | changes))  # type: ignore[arg-type]


def test_a_calibration_is_read_back_for_its_own_budget() -> None:
    stored = {KEY: make().to_json()}
    assert read_turn_calibration(stored, {"cost": 0.5}) == make()
    assert read_turn_calibration(stored, {"cost": 0.6}) is None
    assert read_turn_calibration({}, {"cost": 0.5}) is None


def test_a_damaged_calibration_is_an_error_of_one_line() -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_turn_calibration({KEY: {"shifts": "no"}}, {"cost": 0.5})


@pytest.mark.parametrize("damage", [{"shifts": [math.nan, math.nan]}, {"share": 7.0}, {"limits": []}])
def test_numbers_that_do_not_belong_together_are_refused(damage: dict[str, Any]) -> None:
    stored = calibrated(0.2)[0].to_json() | damage
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_turn_calibration({KEY: stored}, {"cost": 0.2})


def test_passes_without_a_task_in_common_are_not_mixed() -> None:
    even = np.arange(TASKS) % 2 == 0
    costs = {0.0: 1.0, 1.0: 0.0}
    passes = [
        CalibrationPass(shift, np.full(TASKS, cost), np.where(even == (shift > 0), 1.0, np.nan))
        for shift, cost in costs.items()
    ]
    found = calibrate_turns(passes, "cost", 0.5, rows=TASKS)
    assert found.shifts == (1.0, 1.0)
    assert found.costs == (0.0,)
    assert found.feasible
