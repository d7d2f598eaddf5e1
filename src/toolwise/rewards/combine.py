"""Several rewards into one result a rollout.

sum         score = Σ wᵢ·sᵢ, and step rewards alike
normalize   each sᵢ is first normalised within its group (GDPO, arXiv 2601.05242), so that a reward of large range does
            not drown the others; a reward that is the same all over a group then says nothing
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from toolwise.protocols import Executor
from toolwise.rewards.function import Reward, faulty
from toolwise.types import EvaluateResult, MetricResult, Rollout, StepOutput

Combine = Literal["sum", "normalize"]


@dataclass(frozen=True, slots=True)
class Weighted:
    """A reward and how much it counts."""

    reward: Reward
    weight: float = 1.0
    name: str = ""
    """What metrics and records call it; the reward's own name where it is not given."""

    @property
    def label(self) -> str:
        return self.name or self.reward.name


def combine(
    parts: Sequence[tuple[Weighted, Sequence[EvaluateResult]]], groups: Sequence[str], how: Combine
) -> list[EvaluateResult]:
    """One result a rollout from each part's results, in order. `groups` names each rollout's group."""
    scores = [[result.score if result.counts else None for result in results] for _, results in parts]
    if how == "normalize":
        scores = [normalized(part, groups) for part in scores]
    return [
        _combined([(weighted, results[i], scores[p][i]) for p, (weighted, results) in enumerate(parts)])
        for i in range(len(groups))
    ]


def normalized(scores: Sequence[float | None], groups: Sequence[str]) -> list[float | None]:
    """Scores less their group's mean, over its sample standard deviation; what did not count stays out."""
    by_group: dict[str, list[float]] = defaultdict(list)
    for score, group in zip(scores, groups, strict=True):
        if score is not None:
            by_group[group].append(score)
    out: list[float | None] = []
    for score, group in zip(scores, groups, strict=True):
        found = by_group[group]
        if score is None:
            out.append(None)
        elif len(found) < 2 or min(found) == max(found):
            out.append(0.0)
        else:
            mean = sum(found) / len(found)
            std = (sum((x - mean) ** 2 for x in found) / (len(found) - 1)) ** 0.5
            out.append((score - mean) / (std + 1e-6))
    return out


def _combined(parts: Sequence[tuple[Weighted, EvaluateResult, float | None]]) -> EvaluateResult:
    """Counts only where every part does: a missing part is not a zero."""
    total = 0.0
    metrics: dict[str, MetricResult] = {}
    steps: dict[int | str, float] = {}
    reasons = []
    labels = {weighted.label for weighted, _, _ in parts}
    for weighted, result, score in parts:
        name = weighted.label
        if score is None:
            fault = result.error
            kind, message = (fault.kind, fault.message) if fault else ("not_valid", result.reason or "not valid")
            return faulty(kind, f"{name}: {message}", fault.traceback if fault else "")
        total += weighted.weight * score
        for key, value in result.metrics.items():
            metrics[f"{name}/{key}" if key in metrics or key in labels else key] = value
        metrics[name] = MetricResult(score=result.score or 0.0, reason=result.reason or "")
        for output in result.step_outputs or ():
            steps[output.step_index] = steps.get(output.step_index, 0.0) + weighted.weight * output.base_reward
        if result.reason:
            reasons.append(f"{name}: {result.reason}")
    outputs = [StepOutput(step_index=index, base_reward=reward) for index, reward in steps.items()]
    return EvaluateResult(
        score=total, reason="; ".join(reasons) or None, metrics=metrics, step_outputs=outputs if outputs else None
    )


@dataclass(frozen=True, slots=True)
class Rewards:
    """What a run scores its rollouts by: one reward, or several combined."""

    parts: tuple[Weighted, ...]
    how: Combine = "sum"

    @property
    def name(self) -> str:
        return " + ".join(part.reward.name for part in self.parts)

    async def evaluate(self, executor: Executor, rollouts: Sequence[Rollout], *, step: int) -> list[EvaluateResult]:
        """One result a rollout, in order. A single reward of weight 1 is passed on as it is."""
        results = [await executor.evaluate(part.reward, rollouts, step=step) for part in self.parts]
        if len(self.parts) == 1 and self.parts[0].weight == 1.0 and self.how == "sum":
            return results[0]
        groups = [rollout.group_id for rollout in rollouts]
        return combine(list(zip(self.parts, results, strict=True)), groups, self.how)
