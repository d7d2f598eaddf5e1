"""Finds problems in the trial rollouts: problems fail the dry run, notes are only shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from toolwise.training.run import Run
from toolwise.types import ScoredRollout, StepData, StopReason

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
    name, max_error_rate = run.scoring.rewards.name, run.config.reward.max_error_rate
    errors = [s.result.error for s in scored if s.result.error is not None]
    if errors:
        text = (
            f"the reward {name} failed on {len(errors)} of {len(scored)} rollouts: {errors[0].kind}: "
            f"{_one_line(errors[0].message)}"
        )
        serious = len(errors) > max_error_rate * len(scored)
        findings.report(text, serious=serious)
        findings.traceback = errors[0].traceback if serious else ""
    elif not any(s.result.has_valid_score for s in scored):
        reason = next((s.result.reason for s in scored if s.result.reason), None)
        because = f": {_one_line(reason)}" if reason else ""
        findings.problems.append(f"the reward {name} gave no valid score for any of {len(scored)} rollouts{because}")


def _check_endings(scored: Sequence[ScoredRollout], findings: DryRunReport) -> None:
    unusable = [s.rollout for s in scored if not s.rollout.trainable or not s.rollout.steps]
    refused = [r for r in unusable if r.stop_reason is StopReason.POLICY_FAULT and TEMPLATE_FAULT in (r.fault or "")]
    other_errors = [r for r in unusable if r not in refused]
    for rollouts in (refused, other_errors):
        if rollouts:
            cause = _one_line(rollouts[0].fault or rollouts[0].stop_reason.value)
            text = f"{len(rollouts)} of {len(scored)} rollouts ended with {rollouts[0].stop_reason.value}: {cause}"
            serious = rollouts is refused or len(unusable) == len(scored)
            findings.report(text, serious=serious)


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
    unused = [name for name in run.scheduler.tools if name not in calls]
    if unused:
        findings.notes.append(
            f"never called: {', '.join(unused)}; test a tool without a model with `toolwise check tool`"
        )


def _check_prompts(run: Run, scored: Sequence[ScoredRollout], findings: DryRunReport) -> None:
    """With a chat template that ignores `tools`, the agent never sees them."""
    if run.config.env.name != "tools":
        return
    for s in scored:
        task, prompt = s.rollout.task, _first_prompt(run, s)
        offered = [name for name in run.scheduler.tools if task.tools is None or name in task.tools]
        as_rendered = task.prompt_ids is None and s.rollout.route is None  # a route may offer fewer tools
        if offered and prompt and as_rendered and not any(name in prompt for name in offered):
            findings.problems.append(
                f"the prompt names none of the tools ({', '.join(offered)}): the chat template ignores `tools`; "
                'set rollout.tool_prompt = "auto" or "system" to put them into the system message'
            )
            return


def _first_prompt(run: Run, scored: ScoredRollout) -> str:
    step = next(_sampled([scored]), None)
    return str(run.chat.tokenizer.decode(list(step.tokens.prompt_ids))) if step is not None else ""


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
