"""Signs that a supervised fine-tuning run has learned nothing, each with a cause and a fix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from toolwise.training.sft_run import SftRun
from toolwise.types.findings import Finding

MIN_STEPS = 20
"""Shorter runs are not judged by the course of their losses."""
MAX_NOT_FINITE = 20
"""A run stops after this many losses in a row that are not finite numbers."""
_LOWER = 'lower lr, or train in float32 (model.dtype = "float32")'


def not_finite(step: int, loss: float) -> Finding:
    """At the first such step."""
    says = f"The loss of step {step} is {loss}, so its update was skipped"
    return Finding("loss_not_finite", "warning", says, cure=f"If it happens again, {_LOWER}", step=step)


def end_findings(run: SftRun, losses: Sequence[float]) -> list[Finding]:
    """When all steps are done; `losses` are the finite ones of all training steps."""
    progress = run.progress
    if not progress.updated:
        return [_unchanged(run)]
    found = [_training(run, losses) if progress.step >= MIN_STEPS else None, _validation(run)]
    if progress.not_finite > 1:
        says = f"The loss was not finite in {progress.not_finite} of {progress.step} steps, which changed nothing"
        found.append(Finding("losses_not_finite", "warning", says, cure=_LOWER.capitalize(), step=progress.step))
    return [finding for finding in found if finding is not None]


def _training(run: SftRun, losses: Sequence[float]) -> Finding | None:
    tenth = max(1, len(losses) // 10)
    if not losses or (last := fmean(losses[-tenth:])) < (first := fmean(losses[:tenth])):
        return None
    says = f"The training loss did not fall: {first:.3f} in the first {tenth} steps, {last:.3f} in the last"
    cure = "Raise or lower lr, train for longer, or check that the replies can be predicted from their prompts"
    return Finding("loss_not_falling", "warning", says, cure=cure, step=run.progress.step)


def _validation(run: SftRun) -> Finding | None:
    """A run that never got below the loss before training is told so however short it is."""
    progress = run.progress
    before, after, best = progress.before, progress.validation, progress.best
    if before is None or not math.isfinite(before) or after is None or after < before:
        return None
    says = f"The validation loss did not fall: {before:.3f} before training, {after:.3f} after"
    if best is not None and best < before:
        if progress.step < MIN_STEPS:
            return None
        cure = f"Use fewer steps or trainer.keep_best: it was {best:.3f} at step {progress.best_step}"
    else:
        if run.config.trainer.keep_best and best is not None:
            says += f"; the saved model is the best trained one, of step {progress.best_step} with {best:.3f}"
        says += "; the model before training is better on the held-out conversations"
        cure = "Use a lower lr, or more conversations like the held-out ones"
    return Finding("validation_not_falling", "warning", says, cure=cure, step=progress.step)


def _unchanged(run: SftRun) -> Finding:
    progress = run.progress
    if run.config.lr == 0.0:
        why, cure = "lr is 0", "Set lr"
    elif progress.not_finite == progress.step:
        why, cure = "all losses were not finite numbers", f"Check the model's weights; {_LOWER}"
    else:
        why, cure = "all updates were skipped or had no gradient", "Look at grad_norm in metrics.jsonl"
    says = f"No weight of the model has changed in {progress.step} steps: {why}"
    return Finding("weights_unchanged", "warning", says, cure=cure, step=progress.step)
