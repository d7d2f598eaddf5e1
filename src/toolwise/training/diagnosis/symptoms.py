"""Symptoms in a step's rollouts that nothing can be learned.

A symptom becomes a finding only if all of the first steps show it; a single unlucky step does not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from toolwise.advantages import ESTIMATORS
from toolwise.advantages.step_rewards import totals_before_costs
from toolwise.config.schema import RunConfig
from toolwise.protocols import AdvantageEstimator
from toolwise.types import Rollout, ScoredRollout, StopReason
from toolwise.types.findings import Finding

FIRST_STEPS = 3
"""A symptom that all of the first `FIRST_STEPS` steps show is a finding."""
NEARLY_ALL = 0.95
ALL, ALL_TOOL_USERS = "All rollouts", "All rollouts that called a tool"


@dataclass(frozen=True, slots=True)
class Symptom:
    """`evidence` checks one step and returns None if it is healthy; `explain` describes the common evidence."""

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
    if algorithm.adv_estimator not in ESTIMATORS and estimator.learns_from_equal_scores(score):
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
    acted = [s.rollout for s in scored if s.rollout.steps]
    return "cut" if acted and sum(map(_hit_length_limit, acted)) >= NEARLY_ALL * len(acted) else None


def _hit_length_limit(rollout: Rollout) -> bool:
    return rollout.steps[-1].tokens.finish_reason == "length"


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
    users = [s.rollout for s in scored if _used_tool(s.rollout)]
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


def _used_tool(rollout: Rollout) -> bool:
    return any(step.step_info.get("calls") for step in rollout.steps)


def _explain_faults(evidence: str, rollouts: int, config: RunConfig) -> tuple[str, str]:
    who, _, fault = evidence.partition("\n")
    return (
        f"{who} of the first {FIRST_STEPS} steps ({rollouts} in all) ended with a fault of the model, the environment "
        f"or a tool, or at their deadline (rollout.deadline_s = {config.rollout.deadline_s:g}), most often: {fault}",
        "See `stop_reason` and `fault` in rollouts/step-000001.jsonl: fix the cause, or raise the deadline",
    )


SYMPTOMS = (
    Symptom("constant_reward", _equal_rewards, _explain_equal_rewards),
    Symptom("replies_cut", _cut, _explain_cut),
    Symptom("episodes_failed", _faults, _explain_faults, _combine_faults, ("constant_reward",)),
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
