"""Validation: roll out and score the held-out tasks without training, during a run and for `toolwise eval`."""

from __future__ import annotations

from toolwise.training.loop import score
from toolwise.training.run import Run
from toolwise.types import ScoredRollout


async def validate(run: Run) -> list[ScoredRollout]:
    """One rollout per held-out task, greedy unless `validation.do_sample` is set."""
    decisions = run.router.decide(run.validation_tasks, 1, run.progress.step, label="eval", explore=False)
    rollouts = await run.scheduler.roll_out(decisions, do_sample=run.config.validation.do_sample)
    return await score(run, rollouts)
