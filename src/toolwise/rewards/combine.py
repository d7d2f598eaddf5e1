"""Combines several rewards into one result per rollout.

sum         score = Σ wᵢ·sᵢ; step rewards are combined the same way
normalize   each sᵢ is first normalized within its group (GDPO, arXiv 2601.05242), so that a reward with a large range
            does not drown out the others; its step rewards are divided by the same standard deviation. A reward that is
            constant within a group contributes nothing, and neither do its step rewards
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import PurePath
from typing import Any, Literal

from toolwise.errors import ConfigError
from toolwise.rewards.executor import Executor
from toolwise.rewards.function import Reward
from toolwise.rewards.results import fault_result, read_result
from toolwise.types import EvaluateResult, MetricResult, Rollout, StepOutput
from toolwise.untrusted.bounds import MAX_REASON_CHARS, MAX_SCORE, in_bounds, truncate_text

CombineMode = Literal["sum", "normalize"]
RewardSource = str | Callable[..., Any] | Reward


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """A reward and its weight."""

    reward: Reward
    weight: float = 1.0
    name: str = ""
    """Name in metrics and records; defaults to the reward's name."""

    @property
    def label(self) -> str:
        return self.name or self.reward.name


def combine(
    parts: Sequence[tuple[WeightedReward, Sequence[EvaluateResult]]], groups: Sequence[str], combine_mode: CombineMode
) -> list[EvaluateResult]:
    """One result per rollout from the results of all parts, in order. `groups` holds each rollout's group id."""
    scores = [[result.score if result.has_valid_score else None for result in results] for _, results in parts]
    scales = [[1.0] * len(groups) for _ in parts]
    if combine_mode == "normalize":
        normalized = [normalize_by_group(part, groups) for part in scores]
        scores, scales = [part for part, _ in normalized], [part for _, part in normalized]
    combined = []
    for i in range(len(groups)):
        members = [(weighted, results[i], scores[p][i], scales[p][i]) for p, (weighted, results) in enumerate(parts)]
        result = _combine_rollout(members)
        if combine_mode == "sum" and all(part.is_sum_of_steps for _, part, _, _ in members):
            result.model_fields_set.discard("score")  # so that `complete_score` fills it in, as for each part alone
        combined.append(result)
    return combined


def normalize_by_group(scores: Sequence[float | None], groups: Sequence[str]) -> tuple[list[float | None], list[float]]:
    """(score − group mean) / sample standard deviation of the group, ignoring invalid scores (None); and the factor for
    each rollout's step rewards, which is 0 if all scores of the group are equal."""
    members: dict[str, list[float]] = {group: [] for group in groups}
    for score, group in zip(scores, groups, strict=True):
        if score is not None:
            members[group].append(score)
    means, scales = dict[str, float](), dict[str, float]()
    for group, values in members.items():
        mean = means[group] = sum(values) / max(len(values), 1)
        std = (sum((x - mean) ** 2 for x in values) / max(len(values) - 1, 1)) ** 0.5
        scales[group] = 1 / (std + 1e-6) if len(set(values)) > 1 else 0.0
    normalized = [
        None if score is None else (score - means[group]) * scales[group] if scales[group] else 0.0
        for score, group in zip(scores, groups, strict=True)
    ]
    return normalized, [scales[group] for group in groups]


def _combine_step_outputs(parts: Sequence[tuple[float, EvaluateResult]]) -> list[StepOutput]:
    """The weighted sum of step rewards, one output per step.

    Duplicates within a part and values out of bounds are not added; they follow the sums for the aligner to report.
    """
    totals: dict[str, StepOutput] = {}
    rejected: list[StepOutput] = []
    for weight, result in parts:
        seen: set[str] = set()
        for output in result.step_outputs or ():
            key = str(output.step_index)
            reward = weight * output.base_reward
            if key in seen or not in_bounds(reward):
                rejected.append(StepOutput(step_index=output.step_index, base_reward=reward))
            else:
                total = totals.get(key, StepOutput(step_index=output.step_index, base_reward=0.0))
                totals[key] = total.model_copy(update={"base_reward": total.base_reward + reward})
            seen.add(key)
    return [*totals.values(), *rejected]


def _combine_rollout(parts: Sequence[tuple[WeightedReward, EvaluateResult, float | None, float]]) -> EvaluateResult:
    """Valid only if every part is valid: a missing part is not a zero. An error only if a part is one."""
    if missing := [(weighted.label, result) for weighted, result, score, _ in parts if score is None]:
        name, result = next((part for part in missing if part[1].error is not None), missing[0])
        if (fault := result.error) is None:
            return EvaluateResult(is_score_valid=False, reason=f"{name}: {result.reason or 'not valid'}")
        return fault_result(fault.kind, f"{name}: {fault.message}", fault.traceback)
    total = 0.0
    metrics: dict[str, MetricResult] = {}
    reasons = []
    labels = {weighted.label for weighted, *_ in parts}
    for weighted, result, score, _ in parts:
        name = weighted.label
        total += weighted.weight * (score or 0.0)
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
    """The reward of a run: one reward, or several combined."""

    parts: tuple[WeightedReward, ...]
    combine_mode: CombineMode = "sum"

    @property
    def name(self) -> str:
        return " + ".join(part.reward.name for part in self.parts)

    async def evaluate(self, executor: Executor, rollouts: Sequence[Rollout], *, step: int) -> list[EvaluateResult]:
        """One result per rollout, in order. A single reward with weight 1 is returned unchanged."""
        raw_results = [await executor.evaluate(part.reward, rollouts, step=step) for part in self.parts]
        results = [[read_result(value) for value in values] for values in raw_results]  # an executor may be user code
        if len(self.parts) == 1 and self.parts[0].weight == 1.0 and self.combine_mode == "sum":
            return results[0]
        groups = [rollout.group_id for rollout in rollouts]
        return combine(list(zip(self.parts, results, strict=True)), groups, self.combine_mode)


def part_names(sources: Sequence[RewardSource], given: Sequence[str] = ()) -> list[str]:
    """One name per source, in order. `given` holds the configured names ("" means none).

    A part without a name takes its function's name; if several share it, `module:function`, then numbered.
    """
    names = [*given, *[""] * (len(sources) - len(given))]
    duplicates = [name for name, times in Counter(filter(None, names)).items() if times > 1]
    if duplicates:
        raise ConfigError(f"reward.parts: two parts have the name {duplicates[0]!r}; give each a different one")
    origins = [_split_source(source) for source in sources]
    shared = Counter(function or module for (module, function), name in zip(origins, names, strict=True) if not name)
    for index, (module, function) in enumerate(origins):
        if not names[index]:
            short = function or module
            name = f"{module}:{function}" if module and function and shared[short] > 1 else short
            candidates = chain([name], (f"{name}-{number}" for number in count(2)))
            names[index] = next(candidate for candidate in candidates if candidate not in names)
    return names


def _split_source(source: RewardSource) -> tuple[str, str]:
    """The last component of the module or file, and the function name if the source has one."""
    if isinstance(source, Reward):
        source = source.reference or source.function or source.name
    if not isinstance(source, str):
        return source.__module__.rpartition(".")[2], str(getattr(source, "__name__", type(source).__name__))
    module, _, function = ("", "", "") if source.endswith(".py") else source.rpartition(":")
    home = module or source
    return PurePath(home).stem if home.endswith(".py") else home.rpartition(".")[2], function if module else ""
