"""Rolls out and scores tasks without training: validation during a run, and `toolwise eval`."""

from __future__ import annotations

from collections.abc import Sequence

from toolwise.errors import RewardError
from toolwise.rewards.align import align_rollouts
from toolwise.training.rollout_setup import RolloutSetup
from toolwise.types import Rollout, ScoredRollout


async def validate(setup: RolloutSetup, *, step: int = 0) -> list[ScoredRollout]:
    """One rollout per held-out task, greedy unless `validation.do_sample` is set; samples depend on `step`."""
    decisions = setup.router.decide(setup.validation_tasks, 1, step, label="eval", explore=False)
    rollouts = await setup.scheduler.roll_out(decisions, do_sample=setup.config.validation.do_sample)
    return await score(setup, rollouts, step=step)


async def score(setup: RolloutSetup, rollouts: Sequence[Rollout], *, step: int = 0) -> list[ScoredRollout]:
    """Score all rollouts and align the rewards to steps; raises only if too many rewards failed."""
    results = await setup.scoring.evaluate(rollouts, step=step)
    faults = [(r, result.error) for r, result in zip(rollouts, results, strict=True) if result.error is not None]
    if len(faults) > setup.config.reward.max_error_rate * len(rollouts):
        rollout, fault = faults[0]
        reason = " ".join(fault.message.split())
        error = RewardError(
            f"reward {setup.scoring.rewards.name} failed on {len(faults)} of {len(rollouts)} rollouts, more than "
            f"reward.max_error_rate allows; first on {rollout.rollout_id}: {fault.kind}: {reason}"
        )
        if fault.traceback:
            error.add_note(fault.traceback.rstrip())
        raise error
    return align_rollouts(rollouts, results)
