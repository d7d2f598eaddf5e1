"""Symptoms in a step's rollouts that nothing can be learned, and why no weight of the actor has changed.

A symptom becomes a finding only if all of the first steps show it; a single unlucky step does not count.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from toolwise.advantages import COMPARE_COSTS, ESTIMATORS
from toolwise.advantages.assign import learns_from_equal
from toolwise.advantages.step_rewards import totals_before_costs
from toolwise.config.schema import RunConfig
from toolwise.protocols import AdvantageEstimator
from toolwise.training.metrics import PARSER_FAULT, tool_faults
from toolwise.types import Rollout, ScoredRollout, StopReason
from toolwise.types.findings import Finding

FIRST_STEPS = 3
"""A symptom that all of the first `FIRST_STEPS` steps show is a finding."""
NEARLY_ALL = 0.95
UNCHANGED_STEPS_LIMIT = 10
"""Number of steps after which unchanged weights are a finding."""
_PREFER = (
    "use a reward that distinguishes better replies from worse, more rollouts per task (rollout.n), a higher "
    "rollout.temperature, or tasks that the model sometimes solves"
)
_FIX_PARSER = "Fix the parser given as rollout.tool_parser, or set a built-in one, such as hermes"
_CALLS = ("calls", "failed_calls")
"""In `step_info`: by tool, and by kind of failure."""
ALL, ALL_TOOL_USERS = "All rollouts", "All rollouts that called a tool"


@dataclass(frozen=True, slots=True)
class Symptom:
    """`evidence` checks one step and returns None if it is healthy, "" if it shows nothing; `explain` describes the
    common evidence."""

    kind: str
    evidence: Callable[[Sequence[ScoredRollout], RunConfig, AdvantageEstimator], str | None]
    explain: Callable[[str, int, RunConfig], tuple[str, str]]
    """(evidence, rollouts so far, config) -> cause, fix"""
    combine: Callable[[str, str], str | None] = lambda before, now: before if before == now else None
    """(evidence of earlier steps, of this step) -> what they have in common, or None."""
    hides: tuple[str, ...] = ()
    """Symptoms that are only consequences of this one."""


def _equal_rewards(scored: Sequence[ScoredRollout], config: RunConfig, estimator: AdvantageEstimator) -> str | None:
    """Compares rewards as the estimator does: with the default step reward and the penalty for invalid actions."""
    counted = [s for s in scored if s.trainable]
    if len(counted) < 2 or _can_learn_from_equal_rewards(config, estimator, counted[0].score):
        return None
    totals = totals_before_costs(counted, estimator.rewards).tolist()
    rewards = {
        (s.score, total, *(step.base_reward for step in s.steps if step.base_reward is not None))
        for s, total in zip(counted, totals, strict=True)
    }
    return repr(counted[0].score) if len(rewards) == 1 else None


def _can_learn_from_equal_rewards(config: RunConfig, estimator: AdvantageEstimator, score: float) -> bool:
    """Whether there is something to learn even if all rewards equal `score`: the cost or labels of routes, if only the
    router is trained; else the cost of thinking, the value of a thinking level, or what a user's estimator finds."""
    router, algorithm, rlvcr = config.router, config.algorithm, config.algorithm.rlvcr
    if not router.train_actor:
        return bool(router.budgets) or router.label_coef > 0.0
    own_or_compares_costs = algorithm.adv_estimator not in ESTIMATORS or algorithm.adv_estimator in COMPARE_COSTS
    if own_or_compares_costs and learns_from_equal(estimator, score):
        return True
    if not rlvcr.enable:
        return False
    if rlvcr.subtract_thinking_cost and (rlvcr.budget.price > 0.0 or rlvcr.budget.limit is not None):
        return True
    has_alternatives = rlvcr.steps != "mixed" and rlvcr.share > 0.0 and rlvcr.step_advantage_w != 0.0
    not_gated = rlvcr.gate == "none" or (rlvcr.success_score is not None and score >= rlvcr.success_score)
    return algorithm.adv_estimator == "rlvcr" and rlvcr.combine == "additive" and has_alternatives and not_gated


def _explain_equal_rewards(score: str, rollouts: int, config: RunConfig) -> tuple[str, str]:
    return (
        f"All {rollouts} rollouts of the first {FIRST_STEPS} steps have the same reward, {score}: no rollout is better "
        "than another",
        "Read some of them in rollouts/, and test the reward with `toolwise check reward`; if it is correct, choose "
        f"tasks that the model sometimes solves, or raise rollout.temperature (now {config.rollout.temperature:g})",
    )


def _cut(scored: Sequence[ScoredRollout], *_: object) -> str | None:
    ends = [s.rollout.steps[-1].tokens.finish_reason for s in scored if s.rollout.steps]
    return "cut" if ends and ends.count("length") >= NEARLY_ALL * len(ends) else None


def _explain_cut(_: str, rollouts: int, config: RunConfig) -> tuple[str, str]:
    return (
        f"Nearly all of the {rollouts} rollouts of the first {FIRST_STEPS} steps were cut off in mid-reply, after "
        f"rollout.max_new_tokens = {config.rollout.max_new_tokens} tokens: the reward never saw a complete answer",
        "Raise rollout.max_new_tokens, or ask for short replies in the prompt; a model that never ends its turn needs "
        "`toolwise sft` first",
    )


def _faults(scored: Sequence[ScoredRollout], *_: object) -> str | None:
    """The most frequent fault, if all episodes, or all that used a tool, ended with one."""
    fault_reasons = (StopReason.POLICY_FAULT, StopReason.ENV_FAULT)
    users = [s.rollout for s in scored if any(step.step_info.get("calls") for step in s.rollout.steps)]
    if scored and all(s.rollout.stop_reason in (*fault_reasons, StopReason.DEADLINE) for s in scored):
        who, failed = ALL, [s.rollout for s in scored]
    elif users and all(r.stop_reason in fault_reasons for r in users):
        who, failed = ALL_TOOL_USERS, users
    else:
        return None
    messages = Counter(" ".join((r.fault or r.stop_reason.value).split())[:300] for r in failed)
    return f"{who}\n{messages.most_common(1)[0][0]}"


def _combine_faults(before: str, now: str) -> str:
    """The rollouts that failed in both; the fault may differ between steps."""
    return (
        now.replace(ALL, ALL_TOOL_USERS, 1)
        if before.startswith(ALL_TOOL_USERS) and not now.startswith(ALL_TOOL_USERS)
        else now
    )


def _explain_faults(evidence: str, rollouts: int, config: RunConfig) -> tuple[str, str]:
    who, _, fault = evidence.partition("\n")
    return (
        f"{who} of the first {FIRST_STEPS} steps ({rollouts} in all) ended with a fault of the model, the environment "
        f"or a tool, or at their deadline (rollout.deadline_s = {config.rollout.deadline_s:g}), most often: {fault}",
        f"{_FIX_PARSER}; the fault is in rollouts/step-000001.jsonl"
        if PARSER_FAULT in fault
        else "See `stop_reason` and `fault` in rollouts/step-000001.jsonl: fix the cause, or raise the deadline",
    )


def _failing_tools(scored: Sequence[ScoredRollout], *_: object) -> str | None:
    """The tools of which nearly all calls raised or timed out, and how, a line for each; "" if none was called."""
    faults = {tool: entry for tool, entry in tool_faults(scored).items() if entry[0]}
    lines = [
        f"{tool}: {kinds.most_common(1)[0][0]}"
        for tool, (calls, kinds) in sorted(faults.items())
        if kinds.total() >= NEARLY_ALL * calls
    ]
    return "\n".join(lines) if lines or not faults else None


def _combine_lines(before: str, now: str) -> str | None:
    """The tools or routes that failed in both; a step without any says nothing."""
    if not before or not now:
        return before or now
    earlier = {line.partition(":")[0] for line in before.splitlines()}
    return "\n".join(line for line in now.splitlines() if line.partition(":")[0] in earlier) or None


def _explain_failing_tools(evidence: str, _: int, config: RunConfig) -> tuple[str, str]:
    slow = f"make it faster or raise its timeout (multi_turn.tool_timeout_s = {config.multi_turn.tool_timeout_s:g})"
    return (
        f"Nearly all calls of the first {FIRST_STEPS} steps failed, whatever the model asked: "
        f"{', '.join(evidence.splitlines())}",
        "Read what the tool answered in rollouts/step-000001.jsonl and test it with `toolwise check tool`; "
        f"{slow if 'timeout' in evidence else 'then fix it, or leave it out'}",
    )


def _failing_routes(scored: Sequence[ScoredRollout], *_: object) -> str | None:
    """The routes of which nearly all rollouts ended with a fault, and which, a line for each."""
    by_route: dict[str, list[Rollout]] = defaultdict(list)
    for s in scored:
        if s.rollout.route is not None:
            by_route[s.rollout.route].append(s.rollout)
    lines = []
    for route, rollouts in sorted(by_route.items()):
        failed = [r for r in rollouts if r.stop_reason in (StopReason.POLICY_FAULT, StopReason.ENV_FAULT)]
        if len(failed) >= NEARLY_ALL * len(rollouts):
            faults = Counter(" ".join((r.fault or r.stop_reason.value).split())[:300] for r in failed)
            lines.append(f"{route}: {faults.most_common(1)[0][0]}")
    return "\n".join(lines) if lines or not by_route else None


def _explain_failing_routes(evidence: str, _: int, config: RunConfig) -> tuple[str, str]:
    names = {line.partition(":")[0] for line in evidence.splitlines()}
    policies = {route.policy for route in config.router.routes if route.name in names and route.policy}
    tables = ", ".join(f"[router.policies.{name}]" for name in sorted(policies))
    return (
        f"Nearly all rollouts of the first {FIRST_STEPS} steps on a route ended with a fault, so that the router "
        f"cannot learn when to take it, nor can budgets be calibrated: {'; '.join(evidence.splitlines())}",
        f"Check that the server of {tables} runs and that its address is right"
        if tables
        else "See `fault` in rollouts/step-000001.jsonl and fix the cause, or leave the route out",
    )


def _none_correct(scored: Sequence[ScoredRollout], config: RunConfig, *_: object) -> str | None:
    """With HDPO, the highest correctness, if no rollout counts as correct."""
    if config.algorithm.adv_estimator != "hdpo" or not config.algorithm.efficiency_w:
        return None
    reached = [s.result.correctness for s in scored if s.trainable]
    best = max(reached, default=config.algorithm.correct_threshold)
    return f"{best:g}" if best < config.algorithm.correct_threshold else None


def _explain_none_correct(best: str, rollouts: int, config: RunConfig) -> tuple[str, str]:
    return (
        f"None of the {rollouts} rollouts of the first {FIRST_STEPS} steps counts as correct (at most {best}, and "
        f"algorithm.correct_threshold = {config.algorithm.correct_threshold:g}): HDPO compares the costs of correct "
        "rollouts only, so that it is plain GRPO here",
        "Lower algorithm.correct_threshold to what your reward gives a right answer, or return "
        'metrics={"correct": 1.0} with it; if the model does not solve these tasks yet, begin with easier ones',
    )


SYMPTOMS = (
    Symptom("constant_reward", _equal_rewards, _explain_equal_rewards),
    Symptom("replies_cut", _cut, _explain_cut),
    Symptom("tool_failed", _failing_tools, _explain_failing_tools, _combine_lines),
    Symptom("route_failed", _failing_routes, _explain_failing_routes, _combine_lines),
    Symptom("none_correct", _none_correct, _explain_none_correct, lambda before, now: max(before, now, key=float)),
    Symptom("episodes_failed", _faults, _explain_faults, _combine_faults, ("constant_reward", "route_failed")),
)


def prompt_too_long(scored: Sequence[ScoredRollout], what: str, step: int) -> Finding | None:
    """A single prompt that is too long is a finding."""
    bad = [s.rollout for s in scored if s.rollout.stop_reason is StopReason.PROMPT_TOO_LONG]
    if not bad:
        return None
    tasks = len({r.task.task_id for r in bad}), len({s.rollout.task.task_id for s in scored})
    return Finding(
        "prompt_too_long",
        "warning",
        f"{len(bad)} of {len(scored)} rollouts of {what} ({tasks[0]} of {tasks[1]} tasks) sampled nothing and have no "
        f"score: {(bad[0].fault or 'the prompt does not fit the context').partition(': shorten')[0]} "
        f"(task {bad[0].task.task_id})",
        cure="Shorten or drop such prompts, lower rollout.max_new_tokens, or use a model with a longer context",
        step=step,
    )


def explain_unchanged(
    config: RunConfig, scored: Sequence[ScoredRollout], metrics: Mapping[str, float], dropped: str
) -> tuple[str, str]:
    """Cause and fix according to the latest step; `dropped` describes the groups of all steps without an update."""
    if not any(s.trainable for s in scored):
        return _nothing_usable(config, scored)
    lr, grad_norm, update_norm = (metrics.get(f"actor/{name}", 0.0) for name in ("lr", "grad_norm", "update_norm"))
    calls_failed, fix_calls = _failed_calls(scored)
    prefer = f"{fix_calls}To get differences to learn from, {_PREFER}"
    reasons = (
        (
            not metrics.get("actor/updates"),
            f"{dropped} dropped, because the rewards within each are equal or too few of its rollouts are usable"
            f"{calls_failed}",
            prefer,
        ),
        (
            grad_norm == 0,
            f"the gradient is 0, because all advantages are 0 or the rollouts of a task are identical{calls_failed}",
            prefer,
        ),
        (
            lr == 0,
            f"the learning rate is 0 (actor.lr = {config.actor.lr:g})",
            "Look at actor.lr_schedule and warmup_steps",
        ),
        (
            update_norm == 0 and metrics.get("actor/skipped_updates"),
            f"every optimizer step was skipped, the latest with a gradient norm of {grad_norm:.3g}",
            "The log names the rollouts: look for very large rewards; actor.spike_factor = 0 skips only non-finite "
            "gradients",
        ),
        (
            True,
            f"updates of norm {update_norm:.1e} are rounded away in {_dtype(config)} weights",
            f"Raise actor.lr (now {config.actor.lr:g})",
        ),
    )
    return next((cause, cure) for applies, cause, cure in reasons if applies)


def _failed_calls(scored: Sequence[ScoredRollout]) -> tuple[str, str]:
    """That nearly all calls of a step failed, or those of a tool, and what to do first; else nothing."""
    infos = [step.step_info for s in scored for step in s.rollout.steps]
    tools, failed = (sum((Counter(info.get(name) or {}) for info in infos), Counter[str]()) for name in _CALLS)
    calls = max(tools.total(), failed.total())  # a call of a tool that does not exist is not among those of tools
    cure = "First read in rollouts/ why the calls fail, and test the tools with `toolwise check tool`. "
    if calls and failed.total() >= NEARLY_ALL * calls:
        kinds = ", ".join(f"{kind} ({times})" for kind, times in failed.most_common(3))
        named = f" of {', '.join(sorted(tools)[:5])}" if tools else ""
        return f"; {failed.total()} of the {calls} calls{named} in the latest step failed: {kinds}", cure
    broken = (_failing_tools(scored) or "").splitlines()
    says = f"; nearly all calls of a tool failed in the latest step: {', '.join(broken)}" if broken else ""
    return says, cure if broken else ""


def _dtype(config: RunConfig) -> str:
    from toolwise.models.loader import resolve_dtype

    return resolve_dtype(config.model.dtype, config.model.device)


def _nothing_usable(config: RunConfig, scored: Sequence[ScoredRollout]) -> tuple[str, str]:
    if not scored:
        return "there were no rollouts", "Look at the log"
    unscored = [s for s in scored if s.rollout.trainable and not s.result.has_valid_score]
    (reason, _), *_ = Counter(s.rollout.stop_reason for s in scored).most_common(1)
    if unscored and len(unscored) * 2 >= len(scored):
        detail = " ".join((unscored[0].result.reason or "the result is not valid").split())
        return f"no rollout got a valid score: {detail}", "Test the reward on stored rollouts: toolwise check reward"
    fault = next((s.rollout.fault for s in scored if s.rollout.stop_reason is reason and s.rollout.fault), None)
    detail = f": {fault.partition(': shorten')[0]}" if fault else ""
    if reason is StopReason.PROMPT_TOO_LONG:
        return (
            f"no prompt fits the context{detail}",
            f"Shorten the prompts, or lower rollout.max_new_tokens (now {config.rollout.max_new_tokens})",
        )
    if reason.trainable:
        return "no rollout could be trained on", "Read some in rollouts/: `fault` and `error` say what is wrong"
    cure = _FIX_PARSER if PARSER_FAULT in detail else "Fix the tool, environment or server"
    return f"the rollouts ended with {reason.value}{detail}", cure
