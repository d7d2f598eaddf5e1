"""What is wrong with the rollouts of a trial: problems that would stop or ruin a run, and notes worth reading."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from toolwise.training.run import Run
from toolwise.types import ScoredRollout, StepData, StopReason

TOOL_FAULTS = ("exception", "timeout", "server_down")
"""Failures of a call that are the tool's fault, not the model's."""
TEMPLATE_FAULT = "the chat template of "
"""How a fault in rendering begins: it comes back whenever a conversation takes that turn."""


@dataclass(slots=True)
class DryRunReport:
    problems: list[str] = field(default_factory=list)
    """Each one fails the dry run."""
    notes: list[str] = field(default_factory=list)
    traceback: str = ""
    """Of the first reward that failed."""


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
    name, allowed = run.scoring.rewards.name, run.config.reward.max_error_rate
    faults = [s.result.error for s in scored if s.result.error is not None]
    if faults:
        text = (
            f"the reward {name} failed on {len(faults)} of {len(scored)} rollouts: {faults[0].kind}: "
            f"{_one_line(faults[0].message)}"
        )
        if len(faults) > allowed * len(scored):
            findings.problems.append(text)
            findings.traceback = faults[0].traceback
        else:
            findings.notes.append(text)
    elif not any(s.result.has_valid_score for s in scored):
        reason = next((s.result.reason for s in scored if s.result.reason), None)
        because = f": {_one_line(reason)}" if reason else ""
        findings.problems.append(f"the reward {name} gave no valid score for any of {len(scored)} rollouts{because}")


def _check_endings(scored: Sequence[ScoredRollout], findings: DryRunReport) -> None:
    lost = [s.rollout for s in scored if not s.rollout.trainable or not s.rollout.steps]
    refused = [r for r in lost if r.stop_reason is StopReason.POLICY_FAULT and TEMPLATE_FAULT in (r.fault or "")]
    others = [r for r in lost if r not in refused]
    for ended in (refused, others):
        if ended:
            cause = _one_line(ended[0].fault or ended[0].stop_reason.value)
            text = f"{len(ended)} of {len(scored)} rollouts ended with {ended[0].stop_reason.value}: {cause}"
            serious = ended is refused or len(lost) == len(scored)
            (findings.problems if serious else findings.notes).append(text)


def _check_tools(run: Run, scored: Sequence[ScoredRollout], findings: DryRunReport) -> None:
    calls: Counter[str] = Counter()
    working: set[str] = set()
    raising: set[str] = set()
    for step in (step for s in scored for step in s.steps):
        made, failed = step.step_info.get("calls") or {}, step.step_info.get("failed_calls") or {}
        calls.update(made)
        if sum(failed.get(kind, 0) for kind in TOOL_FAULTS) < sum(made.values()):
            working.update(made)
        if failed.get("exception", 0) == sum(made.values()):
            raising.update(made)
    for name, count in calls.items():
        if name not in working and name in run.scheduler.tools:
            said = next((m.content or "" for s in scored for m in s.rollout.messages if m.name == name), "")
            text = f"the tool {name} failed on every call ({count}): {_one_line(said).removeprefix('error: ')}"
            (findings.problems if count > 1 or name in raising else findings.notes).append(text)
    unused = [name for name in run.scheduler.tools if name not in calls]
    if unused:
        findings.notes.append(
            f"never called here: {', '.join(unused)}; `toolwise check tool` tries a tool without a model"
        )


def _check_prompts(run: Run, scored: Sequence[ScoredRollout], findings: DryRunReport) -> None:
    """A chat template that ignores `tools` trains an agent that is never told about them."""
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
    told = [step.policy_logprobs for step in scored.steps if step.policy_logprobs]
    return str(run.chat.tokenizer.decode(list(told[0].get("prompt_ids", ())))) if told else ""


def _check_scores(scored: Sequence[ScoredRollout], findings: DryRunReport) -> None:
    scores = [s.score for s in scored if s.result.has_valid_score]
    if len(scores) > 1 and len(set(scores)) == 1:
        findings.notes.append(
            f"all {len(scores)} rollouts got the score {scores[0]:g}: rollouts that score the same teach nothing"
        )


def _check_lengths(run: Run, scored: Sequence[ScoredRollout], findings: DryRunReport) -> None:
    steps = list(_sampled(scored))
    cut = [s for s in steps if (s.policy_logprobs or {}).get("finish_reason") == "length"]
    if steps and 2 * len(cut) > len(steps):
        findings.notes.append(
            f"{len(cut)} of {len(steps)} replies were cut after rollout.max_new_tokens = "
            f"{run.config.rollout.max_new_tokens} tokens: raise it"
        )


def _sampled(scored: Sequence[ScoredRollout]) -> Iterator[StepData]:
    return (step for s in scored for step in s.steps if step.policy_logprobs)


def _one_line(text: str) -> str:
    return " ".join(str(text).split())[:300]
