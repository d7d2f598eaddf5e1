"""The dry run of a configuration, from loading to the report: problems in the trial rollouts fail it, notes are only
shown; and the text it prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from toolwise.checks.dry_run.trial import (
    RolloutTrial,
    TimeRange,
    UpdateTrial,
    actor_of,
    checkpoint_copy_bytes,
    estimate_memory,
    estimate_time,
    try_rollouts,
    try_update,
)
from toolwise.concurrency import deadlines
from toolwise.config.loader import to_toml
from toolwise.config.schema import RunConfig
from toolwise.serve.gateway import build_outside_agent
from toolwise.training.evaluate import failed_part
from toolwise.training.model_check import device_bytes
from toolwise.training.records import RolloutRecord
from toolwise.training.run import Run, assemble
from toolwise.training.startup import announce, show_startup
from toolwise.training.trackers.console import format_duration, rollout_lines
from toolwise.training.trackers.conversation import clean_text, shorten
from toolwise.types import ScoredRollout, StepData, StopReason

Show = Callable[[str], None]
SHOWN_CHARACTERS = 200
TOOL_FAULTS = ("exception", "timeout", "server_down")
"""Kinds of failed calls caused by the tool, not by the model."""
TEMPLATE_FAULT = "the chat template of "
"""Start of a template error message. Such an error recurs whenever a conversation reaches the same state."""


@dataclass(slots=True)
class DryRunReport:
    problems: list[str] = field(default_factory=list)
    """Any of these fails the dry run."""
    notes: list[str] = field(default_factory=list)
    traceback: str = ""
    """Traceback of the first failed reward."""

    def report(self, text: str, *, serious: bool) -> None:
        (self.problems if serious else self.notes).append(text)


def dry_run(config: RunConfig, show: Show) -> DryRunReport:
    """Load everything, roll out and score two tasks, compute their gradients, and estimate memory and time.

    Writes nothing and changes no weights. The configuration is bad if `DryRunReport.problems` is not empty.
    """
    with show_startup():
        run = assemble(config, agent=build_outside_agent(config))
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
    show_memory(run, rollouts, update, show)
    show_time(run, rollouts, update, show)
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
    for number, task in enumerate(trial.tasks, 1):
        scored = [s for s in trial.scored if s.rollout.task.task_id == task.task_id]
        show(f"\nTask {number} of {len(trial.tasks)}: {clean_text(task.task_id)}, {len(scored)} rollouts, first one:")
        if not scored:
            continue
        for label, text, _ in rollout_lines(RolloutRecord.of(scored[0]), SHOWN_CHARACTERS):
            show(f"  {label:<8}{text}")
        route = f", route {scored[0].rollout.route}" if scored[0].rollout.route else ""
        show(f"  score {_score(scored[0])}, stop reason {scored[0].rollout.stop_reason.value}{route}")
        counts = sorted(Counter(map(_score, scored)).items())
        show("  all scores: " + ", ".join(f"{text} × {count}" if count > 1 else text for text, count in counts))


def show_memory(run: Run, rollouts: RolloutTrial, update: UpdateTrial | None, show: Show) -> None:
    parts, device = estimate_memory(run, rollouts, update), actor_of(run).device
    total, available = sum(parts.values()), device_bytes(device)
    warning = "" if total <= available else ": NOT ENOUGH MEMORY"
    show(f"  memory  about {_bytes(total)} of {_bytes(available)} on {device}{warning}")
    show(f"          {', '.join(f'{name} {_bytes(size)}' for name, size in parts.items())}")
    if device.type == "cuda":
        show("          from shapes and settings: docs/memory.md")
    else:
        measured = f", activations measured for {update.tokens:,} tokens" if update and "activations" in parts else ""
        show(f"          from weight sizes{measured}")
    if copied := checkpoint_copy_bytes(run):
        show(f"          and {_bytes(copied)} of CPU memory for the copy that checkpoints are written from")


def show_time(run: Run, rollouts: RolloutTrial, update: UpdateTrial | None, show: Show) -> None:
    config, time = run.config, estimate_time(run, rollouts, update)
    size = f"{config.data.batch_size} tasks × {config.rollout.n} rollouts"
    show(f"  time    {_range(time.total)}: {config.trainer.total_steps} steps of {size} at {_range(time.step)} each")
    show(
        f"          per step: rollouts {_range(time.rollout)}, rewards {_seconds(time.score_s)}, update "
        f"{_seconds(time.update_s)}; validation of {len(run.validation_tasks)} held-out tasks "
        f"{_range(time.validation)} in total"
    )
    show(
        f"          from {len(rollouts.tasks)} tasks × {config.rollout.n} rollouts: low if all rollouts of a step "
        "overlap, high if they run one after another"
    )


def _score(scored: ScoredRollout) -> str:
    result = scored.result
    if result.error is not None:
        return f"none ({result.error.kind}: {shorten(clean_text(result.error.message), 120)})"
    return f"{result.score:.3g}" if result.has_valid_score else "none"


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


def find_problems(run: Run, scored: Sequence[ScoredRollout]) -> DryRunReport:
    findings = DryRunReport()
    _check_rewards(run, scored, findings)
    _check_endings(scored, findings)
    _check_tools(run, scored, findings)
    _check_prompts(run, scored, findings)
    _check_scores(scored, findings)
    _check_lengths(run, scored, findings)
    return findings


def _check_rewards(run: Run, scored: Sequence[ScoredRollout], findings: DryRunReport) -> None:
    name = run.scoring.rewards.name
    if errors := [s.result.error for s in scored if s.result.error is not None]:
        text = (
            f"{failed_part(name, errors[0].kind)} failed on {len(errors)} of {len(scored)} rollouts: {errors[0].kind}: "
            f"{_one_line(errors[0].message)}"
        )
        serious = len(errors) > run.config.reward.max_error_rate * len(scored)
        findings.report(text, serious=serious)
        findings.traceback = errors[0].traceback if serious else ""
    elif not any(s.result.has_valid_score for s in scored):
        reason = next((s.result.reason for s in scored if s.result.reason), None)
        because = f": {_one_line(reason)}" if reason else ""
        findings.problems.append(f"the reward {name} gave no valid score for any of {len(scored)} rollouts{because}")


def _check_endings(scored: Sequence[ScoredRollout], findings: DryRunReport) -> None:
    unusable = [s.rollout for s in scored if not s.rollout.trainable or not s.rollout.steps]
    refused = [r for r in unusable if r.stop_reason is StopReason.POLICY_FAULT and TEMPLATE_FAULT in (r.fault or "")]
    for rollouts in (refused, [r for r in unusable if r not in refused]):
        if rollouts:
            cause = _one_line(rollouts[0].fault or rollouts[0].stop_reason.value)
            text = f"{len(rollouts)} of {len(scored)} rollouts ended with {rollouts[0].stop_reason.value}: {cause}"
            findings.report(text, serious=rollouts is refused or len(unusable) == len(scored))


def _check_tools(run: Run, scored: Sequence[ScoredRollout], findings: DryRunReport) -> None:
    calls: Counter[str] = Counter()
    working: set[str] = set()
    raising: set[str] = set()
    for step in (step for s in scored for step in s.steps):
        step_calls, failed = step.step_info.get("calls") or {}, step.step_info.get("failed_calls") or {}
        calls.update(step_calls)
        if sum(failed.get(kind, 0) for kind in TOOL_FAULTS) < sum(step_calls.values()):
            working.update(step_calls)
        if failed.get("exception", 0) == sum(step_calls.values()):
            raising.update(step_calls)
    for name, count in calls.items():
        if name not in working and name in run.scheduler.tools:
            message = next((m.content or "" for s in scored for m in s.rollout.messages if m.name == name), "")
            text = f"the tool {name} failed on every call ({count}): {_one_line(message).removeprefix('error: ')}"
            findings.report(text, serious=count > 1 or name in raising)
    if unused := [name for name in run.scheduler.tools if name not in calls]:
        findings.notes.append(
            f"never called: {', '.join(unused)}; test a tool without a model with `toolwise check tool`"
        )


def _check_prompts(run: Run, scored: Sequence[ScoredRollout], findings: DryRunReport) -> None:
    """With a chat template that ignores `tools`, the agent never sees them."""
    if run.config.env.name != "tools":
        return
    for s in scored:
        task, step = s.rollout.task, next(_sampled([s]), None)
        prompt = run.chat.tokenizer.decode(list(step.tokens.prompt_ids)) if step is not None else ""
        offered = [name for name in run.scheduler.tools if task.tools is None or name in task.tools]
        as_rendered = task.prompt_ids is None and s.rollout.route is None  # a route may offer fewer tools
        if offered and prompt and as_rendered and not any(name in prompt for name in offered):
            findings.problems.append(
                f"the prompt names none of the tools ({', '.join(offered)}): the chat template ignores `tools`; "
                'set rollout.tool_prompt = "auto" or "system" to put them into the system message'
            )
            return


def _check_scores(scored: Sequence[ScoredRollout], findings: DryRunReport) -> None:
    scores = [s.score for s in scored if s.result.has_valid_score]
    if len(scores) > 1 and len(set(scores)) == 1:
        findings.notes.append(f"all {len(scores)} rollouts scored {scores[0]:g}: equal scores give no training signal")


def _check_lengths(run: Run, scored: Sequence[ScoredRollout], findings: DryRunReport) -> None:
    steps = list(_sampled(scored))
    cut = [s for s in steps if s.tokens.finish_reason == "length"]
    if steps and 2 * len(cut) > len(steps):
        findings.notes.append(
            f"{len(cut)} of {len(steps)} replies were cut off at rollout.max_new_tokens = "
            f"{run.config.rollout.max_new_tokens} tokens: raise it"
        )


def _sampled(scored: Sequence[ScoredRollout]) -> Iterator[StepData]:
    return (step for s in scored for step in s.steps if step.policy_logprobs is not None)


def _one_line(text: str) -> str:
    return " ".join(str(text).split())[:300]
