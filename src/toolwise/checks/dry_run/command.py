"""The dry run of a configuration, from loading to the report, and the text it prints."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

from toolwise.checks.dry_run.estimate import MemoryEstimate, TimeEstimate, TimeRange, estimate_memory, estimate_time
from toolwise.checks.dry_run.problems import DryRunReport, find_problems
from toolwise.checks.dry_run.trial import RolloutTrial, try_rollouts, try_update
from toolwise.concurrency import deadlines
from toolwise.config.loader import to_toml
from toolwise.config.schema import RunConfig
from toolwise.training.records import RolloutRecord
from toolwise.training.run import Run, assemble
from toolwise.training.startup import announce, show_startup
from toolwise.training.trackers.console import format_duration, rollout_lines
from toolwise.training.trackers.conversation import clean_text, shorten
from toolwise.types import ScoredRollout

Show = Callable[[str], None]
SHOWN_CHARACTERS = 200


def dry_run(config: RunConfig, show: Show) -> DryRunReport:
    """Load everything, roll out and score two tasks, compute their gradients, and estimate memory and time.

    Writes nothing and changes no weights. The configuration is bad if `DryRunReport.problems` is not empty.
    """
    with show_startup():
        run = assemble(config)
        try:
            return deadlines.run(_run_trial(run, show))
        finally:
            announce("closing")
            run.close()


async def _run_trial(run: Run, show: Show) -> DryRunReport:
    show_settings(run, show)
    rollouts = await try_rollouts(run)
    show_rollouts(rollouts, show)
    findings = find_problems(run, rollouts.scored)
    findings.notes.extend(str(finding) for finding in run.startup_findings())
    if findings.problems:
        return findings
    update = await try_update(run, rollouts.scored)
    show("\nEstimates for the whole run")
    show_memory(estimate_memory(run, rollouts, update), show)
    show_time(run, estimate_time(run, rollouts, update), show)
    if update is None:
        why = "no rollout is trainable" if run.config.router.train_actor else "router.train_actor is false"
        findings.notes.append(f"the actor update was not tried: {why}")
    return findings


def show_settings(run: Run, show: Show) -> None:
    show("\nSettings that differ from the defaults")
    for line in to_toml(run.config, changed_only=True).splitlines():
        show(f"  {line}".rstrip())
    show(
        f"\n{len(run.batches.tasks)} training tasks, {run.batches.batches_per_epoch} batches per epoch, "
        f"{len(run.validation_tasks)} held-out tasks, tools: {', '.join(run.scheduler.tools) or 'none'}"
    )


def show_rollouts(trial: RolloutTrial, show: Show) -> None:
    """Print the first rollout of each task and the scores of all of them."""
    by_task = {
        task.task_id: [s for s in trial.scored if s.rollout.task.task_id == task.task_id] for task in trial.tasks
    }
    for number, (task_id, scored) in enumerate(by_task.items(), 1):
        show(f"\nTask {number} of {len(by_task)}: {clean_text(task_id)}, {len(scored)} rollouts, first one:")
        if not scored:
            continue
        for label, text, _ in rollout_lines(RolloutRecord.of(scored[0]), SHOWN_CHARACTERS):
            show(f"  {label:<8}{text}")
        route = f", route {scored[0].rollout.route}" if scored[0].rollout.route else ""
        show(f"  score {_score(scored[0])}, stop reason {scored[0].rollout.stop_reason.value}{route}")
        show(f"  all scores: {_format_counts([_score(s) for s in scored])}")


def show_memory(memory: MemoryEstimate, show: Show) -> None:
    parts = ", ".join(f"{name} {_bytes(size)}" for name, size in memory.parts.items())
    warning = "" if memory.total <= memory.available else ": NOT ENOUGH MEMORY"
    show(f"  memory  about {_bytes(memory.total)} of {_bytes(memory.available)} on {memory.device}{warning}")
    show(f"          {parts}")
    show(f"          from {memory.basis}")


def show_time(run: Run, time: TimeEstimate, show: Show) -> None:
    config = run.config
    size = f"{config.data.batch_size} tasks × {config.rollout.n} rollouts"
    show(f"  time    {_range(time.total)}: {config.trainer.total_steps} steps of {size} at {_range(time.step)} each")
    show(
        f"          per step: rollouts {_range(time.rollout)}, rewards {_seconds(time.score_s)}, update "
        f"{_seconds(time.update_s)}; validation of {len(run.validation_tasks)} held-out tasks "
        f"{_range(time.validation)} in total"
    )
    show(f"          {time.basis}")


def _score(scored: ScoredRollout) -> str:
    result = scored.result
    if result.error is not None:
        return f"none ({result.error.kind}: {shorten(clean_text(result.error.message), 120)})"
    return f"{result.score:.3g}" if result.has_valid_score else "none"


def _format_counts(texts: list[str]) -> str:
    groups = [(text, len(list(same))) for text, same in groupby(sorted(texts))]
    return ", ".join(f"{text} × {count}" if count > 1 else text for text, count in groups)


def _bytes(size: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}" if size < 10 * scale else f"{size / scale:.0f} {unit}"
    return f"{size / 1e3:.0f} kB"


def _seconds(seconds: float) -> str:
    return format_duration(seconds) if seconds >= 10 else f"{seconds:.1f}s"


def _range(seconds: TimeRange) -> str:
    low, high = map(_seconds, seconds.tolist())
    return f"about {high}" if low == high else f"{low} to {high}"
