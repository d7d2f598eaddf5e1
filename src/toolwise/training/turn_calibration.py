"""Rolls out the calibration tasks of a router that chooses at every turn, and finds the shift that delivers its budget
(routing/turn_calibration.py)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from toolwise.routing.turn_calibration import CalibrationPass, TurnCalibration, bisect_shift, calibrate_turns
from toolwise.routing.turn_router import TurnRouter
from toolwise.training.evaluate import score
from toolwise.training.rollout_setup import RolloutSetup
from toolwise.types import Task

log = logging.getLogger("toolwise")


async def calibrate_turn_router(
    setup: RolloutSetup, router: TurnRouter, tasks: Sequence[Task], rollouts: int, *, step: int
) -> TurnCalibration | None:
    """Fits the shift on the first `rollouts` of `tasks`, each rolled out at most `router.calibration_passes` times,
    decoded as in validation, and puts it into use. None if no rollout could be scored: the previous shift stays."""
    chosen = tasks[:rollouts]
    ((unit, limit),) = router.budgets.limits.items()

    async def measure(shift: float) -> CalibrationPass | None:
        decisions = router.decide_shifted(chosen, shift, step)
        finished = await setup.scheduler.roll_out(decisions, do_sample=setup.config.validation.do_sample)
        scored = await score(setup, finished, step=step)
        usable = [s.result.has_valid_score and s.rollout.trainable for s in scored]
        if not any(usable):
            return None
        return CalibrationPass(
            shift,
            costs=np.array([router.costs_of(s.rollout)[unit] for s in scored]),
            scores=np.array([s.score if good else np.nan for s, good in zip(scored, usable, strict=True)]),
        )

    passes = await bisect_shift(measure, limit, passes=router.config.calibration_passes)
    if not passes:
        log.warning("step %d: no calibration task was scored, so the budget is not calibrated", step)
        return None
    latest = calibrate_turns(passes, unit, limit, rows=len(chosen), step=step)
    router.calibration = latest
    return latest
