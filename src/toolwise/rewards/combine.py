"""Several rewards into one result a rollout.

sum         score = Σ wᵢ·sᵢ, and step rewards alike
normalize   each sᵢ is first normalised within its group (GDPO, arXiv 2601.05242), so that a reward of large range does
            not drown the others; its step rewards are divided by the same standard deviation. A reward that is the same
            all over a group then says nothing, of its steps neither
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from toolwise.rewards.executor import Executor
from toolwise.rewards.function import Reward, fault_result, read_result
from toolwise.types import EvaluateResult, MetricResult, Rollout, StepOutput
from toolwise.untrusted.bounds import MAX_REASON_CHARS, MAX_SCORE, in_bounds, truncate_text

CombineMode = Literal["sum", "normalize"]


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """A reward and how much it counts."""

    reward: Reward
    weight: float = 1.0
    name: str = ""
    """What metrics and records call it; the reward's own name where it is not given."""

    @property
    def label(self) -> str:
        return self.name or self.reward.name


def combine(
    parts: Sequence[tuple[WeightedReward, Sequence[EvaluateResult]]], groups: Sequence[str], combine_mode: CombineMode
) -> list[EvaluateResult]:
    """One result a rollout from each part's results, in order. `groups` names each rollout's group."""
    scores = [[result.score if result.has_valid_score else None for result in results] for _, results in parts]
    scales = [[1.0] * len(groups) for _ in parts]
    if combine_mode == "normalize":
        scales = [_scales(part, groups) for part in scores]
        scores = [normalize_by_group(part, groups) for part in scores]
    combined = []
    for i in range(len(groups)):
        of_parts = [(weighted, results[i], scores[p][i], scales[p][i]) for p, (weighted, results) in enumerate(parts)]
        result = _combine_rollout(of_parts)
        if combine_mode == "sum" and all(part.is_sum_of_steps for _, part, _, _ in of_parts):
            result.model_fields_set.discard("score")  # so that it is completed as each alone would be
        combined.append(result)
    return combined


def normalize_by_group(scores: Sequence[float | None], groups: Sequence[str]) -> list[float | None]:
    """Scores less their group's mean, over its sample standard deviation; what did not count stays out."""
    found = _scores_by_group(scores, groups)
    means = {group: sum(members) / len(members) for group, members in found.items()}
    scales = _scales(scores, groups)
    return [
        None if score is None else (score - means[group]) * scale if scale else 0.0
        for score, group, scale in zip(scores, groups, scales, strict=True)
    ]


def _scales(scores: Sequence[float | None], groups: Sequence[str]) -> list[float]:
    """What each rollout's score and step rewards are multiplied by; 0 where all scores of its group are the same."""
    scales: dict[str, float] = defaultdict(float)
    for group, found in _scores_by_group(scores, groups).items():
        if min(found) < max(found):
            mean = sum(found) / len(found)
            std = (sum((x - mean) ** 2 for x in found) / (len(found) - 1)) ** 0.5
            scales[group] = 1 / (std + 1e-6)
    return [scales[group] for group in groups]


def _scores_by_group(scores: Sequence[float | None], groups: Sequence[str]) -> dict[str, list[float]]:
    by_group: dict[str, list[float]] = defaultdict(list)
    for score, group in zip(scores, groups, strict=True):
        if score is not None:
            by_group[group].append(score)
    return by_group


def _combine_step_outputs(parts: Sequence[tuple[float, EvaluateResult]]) -> list[StepOutput]:
    """Step rewards added up by weight, one output a step. What a part says of a step twice, or that is not a finite
    number, counts for nothing and comes after them, for the aligner to name."""
    totals: dict[str, StepOutput] = {}
    odd: list[StepOutput] = []
    for weight, result in parts:
        seen: set[str] = set()
        for output in result.step_outputs or ():
            key = str(output.step_index)
            reward = weight * output.base_reward
            if key in seen or not in_bounds(reward):
                odd.append(StepOutput(step_index=output.step_index, base_reward=reward))
            else:
                before = totals.get(key, StepOutput(step_index=output.step_index, base_reward=0.0))
                totals[key] = before.model_copy(update={"base_reward": before.base_reward + reward})
            seen.add(key)
    return [*totals.values(), *odd]


def _combine_rollout(parts: Sequence[tuple[WeightedReward, EvaluateResult, float | None, float]]) -> EvaluateResult:
    """Counts only where every part does: a missing part is not a zero."""
    total = 0.0
    metrics: dict[str, MetricResult] = {}
    reasons = []
    labels = {weighted.label for weighted, *_ in parts}
    for weighted, result, score, _ in parts:
        name = weighted.label
        if score is None:
            fault = result.error
            kind, message = (fault.kind, fault.message) if fault else ("not_valid", result.reason or "not valid")
            return fault_result(kind, f"{name}: {message}", fault.traceback if fault else "")
        total += weighted.weight * score
        for key, value in result.metrics.items():
            metrics[f"{name}/{key}" if key in metrics or key in labels else key] = value
        metrics[name] = MetricResult(score=result.score or 0.0, reason=result.reason or "")
        if result.reason:
            reasons.append(f"{name}: {result.reason}")
    if not in_bounds(total):
        return fault_result("out_of_range", f"the weighted sum is {total}; it must lie between ±{MAX_SCORE:g}")
    outputs = _combine_step_outputs([(weighted.weight * scale, result) for weighted, result, _, scale in parts])
    reason = truncate_text("; ".join(reasons), MAX_REASON_CHARS) or None
    return EvaluateResult(score=total, reason=reason, metrics=metrics, step_outputs=outputs if outputs else None)


@dataclass(frozen=True, slots=True)
class CompositeReward:
    """What a run scores its rollouts by: one reward, or several combined."""

    parts: tuple[WeightedReward, ...]
    combine_mode: CombineMode = "sum"

    @property
    def name(self) -> str:
        return " + ".join(part.reward.name for part in self.parts)

    async def evaluate(self, executor: Executor, rollouts: Sequence[Rollout], *, step: int) -> list[EvaluateResult]:
        """One result a rollout, in order. A single reward of weight 1 is passed on as it is."""
        given = [await executor.evaluate(part.reward, rollouts, step=step) for part in self.parts]
        results = [[read_result(found) for found in one] for one in given]  # an executor may be anybody's
        if len(self.parts) == 1 and self.parts[0].weight == 1.0 and self.combine_mode == "sum":
            return results[0]
        groups = [rollout.group_id for rollout in rollouts]
        return combine(list(zip(self.parts, results, strict=True)), groups, self.combine_mode)
