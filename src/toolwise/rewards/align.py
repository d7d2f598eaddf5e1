"""Assigns the step rewards that a reward function returned to the steps of a rollout.

`step_index` counts the assistant's turns in the rollout from 0 (`step_info["assistant_turn_index"]`); "1" and 1 are
equivalent. Inputs are never modified.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from toolwise.errors import RewardError
from toolwise.types import EvaluateResult, Rollout, ScoredRollout, StepData, StepOutput
from toolwise.untrusted.bounds import in_bounds

log = logging.getLogger("toolwise.rewards")
IssueKind = Literal["unmatched", "duplicate", "missing", "non_finite", "duplicate_rollout"]


class AlignmentIssue(str):
    """One problem found during alignment: a message to read, with its parts as fields to count."""

    name: IssueKind
    step_index: str
    rollout_id: str

    @classmethod
    def of(cls, name: IssueKind, index: str, detail: str, rollout_id: str = "") -> AlignmentIssue:
        subject = "duplicate rollout_id" if name == "duplicate_rollout" else f"{name} step_index {index}"
        issue = cls(f"{f'{rollout_id}: ' if rollout_id else ''}{subject}{detail}")
        issue.name, issue.step_index, issue.rollout_id = name, index, rollout_id
        return issue


@dataclass(frozen=True, slots=True)
class AlignmentResult:
    """Steps with base rewards, final scores in order (None for an invalid result), and alignment problems."""

    steps: dict[str, list[StepData]]
    final_scores: list[float | None]
    warnings: list[AlignmentIssue] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RLDataAligner:
    """Sets each step's `base_reward` from the reward's `step_outputs`. `strict` raises instead of warning."""

    strict: bool = False

    def align_data_for_rl_processing(
        self,
        eval_results_from_sandbox: EvaluateResult | Sequence[EvaluateResult],
        raw_rollout_step_data_map: Mapping[str, Sequence[StepData]],
        rollout_ids_in_order: Sequence[str],
    ) -> AlignmentResult:
        given = eval_results_from_sandbox
        results = [given] if isinstance(given, EvaluateResult) else list(given)
        if len(results) != len(rollout_ids_in_order):
            raise RewardError(
                f"got {len(results)} results for {len(rollout_ids_in_order)} rollouts; there must be one per rollout"
            )
        steps: dict[str, list[StepData]] = {}
        scores: list[float | None] = []
        warnings = duplicate_rollouts(rollout_ids_in_order)
        for rollout_id, result in zip(rollout_ids_in_order, results, strict=True):
            if rollout_id not in raw_rollout_step_data_map:
                raise RewardError(f"there are no steps for rollout {rollout_id!r}")
            aligned, issues = align_steps(raw_rollout_step_data_map[rollout_id], result.step_outputs or (), rollout_id)
            scores.append(complete_score(result, aligned).score if result.has_valid_score else None)
            if rollout_id not in steps:
                steps[rollout_id] = aligned
                warnings += issues
        if warnings and self.strict:
            raise RewardError("; ".join(warnings))
        return AlignmentResult(steps, scores, warnings)


def duplicate_rollouts(rollout_ids: Sequence[str]) -> list[AlignmentIssue]:
    """A warning for each id that occurs more than once."""
    return [
        AlignmentIssue.of("duplicate_rollout", "", f" ({n} times): ids must be unique", key)
        for key, n in Counter(rollout_ids).items()
        if n > 1
    ]


def align_steps(
    steps: Sequence[StepData], outputs: Sequence[StepOutput], rollout_id: str = ""
) -> tuple[list[StepData], list[AlignmentIssue]]:
    """Copies of `steps` with their base rewards, and the problems found."""
    counts = Counter(str(output.step_index) for output in outputs)
    rewards: dict[str, float] = {}
    for output in outputs:
        rewards.setdefault(str(output.step_index), output.base_reward)
    warnings = [
        AlignmentIssue.of("non_finite", key, f": its base_reward is {reward} and is ignored", rollout_id)
        for key, reward in rewards.items()
        if not in_bounds(reward)
    ]
    warnings += [
        AlignmentIssue.of("duplicate", key, f" ({count} times; the first counts)", rollout_id)
        for key, count in counts.items()
        if count > 1
    ]
    aligned = []
    for step in steps:
        key = str(step.step_info.get("assistant_turn_index", step.system_step_index))
        if key in rewards and in_bounds(rewards[key]):
            aligned.append(step.model_copy(update={"base_reward": rewards.pop(key)}))
        else:
            if outputs and rewards.pop(key, None) is None:
                detail = f": that step keeps base_reward {step.base_reward}"
                warnings.append(AlignmentIssue.of("missing", key, detail, rollout_id))
            aligned.append(step)
    warnings += [
        AlignmentIssue.of("unmatched", key, f": the rollout has {len(steps)} steps", rollout_id) for key in rewards
    ]
    return aligned, warnings


def complete_score(result: EvaluateResult, steps: Sequence[StepData]) -> EvaluateResult:
    """Fills in a missing score with the sum of the steps' base rewards, including steps that the result omits."""
    rewards = [step.base_reward for step in steps if step.base_reward is not None]
    return result.model_copy(update={"score": float(sum(rewards))}) if rewards and result.is_sum_of_steps else result


def align_rollouts(rollouts: Sequence[Rollout], results: Sequence[EvaluateResult]) -> list[ScoredRollout]:
    """Pairs rollouts with their results and step rewards; problems are logged in one line.

    Pairs by position, not by id, so that two rollouts with the same id each keep their own steps.
    """
    scored: list[ScoredRollout] = []
    all_warnings = duplicate_rollouts([rollout.rollout_id for rollout in rollouts])
    duplicates = {warning.rollout_id: warning for warning in all_warnings}
    for rollout, result in zip(rollouts, results, strict=True):
        name = rollout.rollout_id
        steps, warnings = align_steps(rollout.steps, result.step_outputs or (), name)
        all_warnings += warnings
        rollout_warnings = (duplicates[name], *warnings) if name in duplicates else tuple(warnings)
        scored.append(ScoredRollout(rollout, complete_score(result, steps), tuple(steps), rollout_warnings))
    if all_warnings:
        others = f" (and {len(all_warnings) - 1} more)" if len(all_warnings) > 1 else ""
        log.warning("problems with step rewards: %s%s", all_warnings[0], others)
    return scored
