"""Signs in a step's rollouts that nothing can be learned, each a small function of them.

A symptom counts only where every one of the first steps shows it: one unlucky step is no finding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from toolwise.advantages.step_rewards import REWARD_SETTINGS, total_rewards
from toolwise.config.schema import RunConfig
from toolwise.training.diagnosis.finding import Finding
from toolwise.types import Rollout, ScoredRollout, StopReason

FIRST_STEPS = 3
"""Steps after which a symptom that all of them had is a finding."""
NEARLY_ALL = 0.95
ALL, ALL_USERS = "All rollouts", "All rollouts that called a tool"


@dataclass(frozen=True, slots=True)
class Symptom:
    """`evidence` of one step, None where it is healthy; `explain` what the first steps had in common."""

    kind: str
    evidence: Callable[[Sequence[ScoredRollout], RunConfig], str | None]
    explain: Callable[[str, int, RunConfig], tuple[str, str]]
    """(evidence, rollouts so far, settings) -> cause, cure"""
    combine: Callable[[str, str], str | None] = lambda before, now: before if before == now else None
    """What the evidence of the steps before and of this one have in common; None: nothing."""
    hides: tuple[str, ...] = ()
    """Symptoms that are only a consequence of this one."""


def _equal_rewards(scored: Sequence[ScoredRollout], config: RunConfig) -> str | None:
    """Rewards as advantages compare them: with the default reward of a step and the price of an invalid action."""
    counted = [s for s in scored if s.trainable]
    if len(counted) < 2 or _equal_rewards_teach(config, counted[0].score):
        return None
    totals = total_rewards(counted, **{name: getattr(config.algorithm, name) for name in REWARD_SETTINGS}).tolist()
    rewards = {
        (s.score, total, *(step.base_reward for step in s.steps if step.base_reward is not None))
        for s, total in zip(counted, totals, strict=True)
    }
    return repr(counted[0].score) if len(rewards) == 1 else None


def _equal_rewards_teach(config: RunConfig, score: float) -> bool:
    """Whether rewards that all equal `score` leave something to learn: what routes cost or are labelled, for a router
    that learns alone; else what thinking costs, or what a thinking level is worth."""
    router, algorithm, rlvcr = config.router, config.algorithm, config.algorithm.rlvcr
    if not router.train_actor:
        return bool(router.budgets) or router.label_coef > 0.0
    if not rlvcr.enable:
        return False
    if rlvcr.price_rollouts and (rlvcr.budget.price > 0.0 or rlvcr.budget.limit is not None):
        return True
    thought_over = rlvcr.steps != "mixed" and rlvcr.share > 0.0 and rlvcr.step_advantage_w != 0.0
    not_gated = rlvcr.gate == "none" or (rlvcr.success_score is not None and score >= rlvcr.success_score)
    return algorithm.adv_estimator == "rlvcr" and rlvcr.combine == "additive" and thought_over and not_gated


def _explain_equal_rewards(score: str, rollouts: int, config: RunConfig) -> tuple[str, str]:
    return (
        f"All {rollouts} rollouts of the first {FIRST_STEPS} steps have the same reward, {score}: there is nothing to "
        "prefer",
        "Read some of them in rollouts/, and try the reward on them with `toolwise check reward`; if it is right, take "
        f"tasks that the model sometimes solves, or raise rollout.temperature (now {config.rollout.temperature:g})",
    )


def _cut(scored: Sequence[ScoredRollout], _: RunConfig) -> str | None:
    acted = [s.rollout for s in scored if s.rollout.steps]
    return "cut" if acted and sum(map(_hit_length_limit, acted)) >= NEARLY_ALL * len(acted) else None


def _hit_length_limit(rollout: Rollout) -> bool:
    return (rollout.steps[-1].policy_logprobs or {}).get("finish_reason") == "length"


def _explain_cut(_: str, rollouts: int, config: RunConfig) -> tuple[str, str]:
    return (
        f"Nearly all of the {rollouts} rollouts of the first {FIRST_STEPS} steps were cut off in mid-reply, after "
        f"rollout.max_new_tokens = {config.rollout.max_new_tokens} tokens: the reward never saw a whole answer",
        "Raise rollout.max_new_tokens, or ask for short replies in the prompt; a model that never ends its turn needs "
        "`toolwise sft` first",
    )


def _faults(scored: Sequence[ScoredRollout], _: RunConfig) -> str | None:
    """The most frequent fault where all episodes ended by one, or all that used a tool."""
    bad = (StopReason.POLICY_FAULT, StopReason.ENV_FAULT)
    users = [s.rollout for s in scored if _used_tool(s.rollout)]
    if scored and all(s.rollout.stop_reason in (*bad, StopReason.DEADLINE) for s in scored):
        who, failed = ALL, [s.rollout for s in scored]
    elif users and all(r.stop_reason in bad for r in users):
        who, failed = ALL_USERS, users
    else:
        return None
    said = Counter(" ".join((r.fault or r.stop_reason.value).split())[:300] for r in failed)
    return f"{who}\n{said.most_common(1)[0][0]}"


def _combine_faults(before: str, now: str) -> str:
    """Who failed in both; the fault may be another one in each step."""
    return now.replace(ALL, ALL_USERS, 1) if before.startswith(ALL_USERS) and not now.startswith(ALL_USERS) else now


def _used_tool(rollout: Rollout) -> bool:
    return any(step.step_info.get("calls") for step in rollout.steps)


def _explain_faults(seen: str, rollouts: int, config: RunConfig) -> tuple[str, str]:
    who, _, fault = seen.partition("\n")
    return (
        f"{who} of the first {FIRST_STEPS} steps ({rollouts} in all) ended by a fault of the model, the world or a "
        f"tool, or at their deadline (rollout.deadline_s = {config.rollout.deadline_s:g}), most often by: {fault}",
        "`stop_reason` and `fault` in rollouts/step-000001.jsonl have them all: put that right, or raise the deadline",
    )


SYMPTOMS = (
    Symptom("constant_reward", _equal_rewards, _explain_equal_rewards),
    Symptom("replies_cut", _cut, _explain_cut),
    Symptom("episodes_failed", _faults, _explain_faults, _combine_faults, ("constant_reward",)),
)


def prompt_too_long(scored: Sequence[ScoredRollout], what: str, step: int) -> Finding | None:
    """Never right, so that one prompt is enough."""
    bad = [s.rollout for s in scored if s.rollout.stop_reason is StopReason.PROMPT_TOO_LONG]
    if not bad:
        return None
    tasks = len({r.task.task_id for r in bad}), len({s.rollout.task.task_id for s in scored})
    return Finding(
        "prompt_too_long",
        f"{len(bad)} of {len(scored)} rollouts of {what} ({tasks[0]} of {tasks[1]} tasks) sampled nothing and have no "
        f"score: {(bad[0].fault or 'the prompt does not fit the context').partition(': shorten')[0]} "
        f"(task {bad[0].task.task_id})",
        "Shorten or drop such prompts, lower rollout.max_new_tokens, or take a model with a longer context",
        step,
    )
