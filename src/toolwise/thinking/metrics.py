"""Metrics of the thinking stage: level usage per kind of step, token costs of thoughts, failed alternatives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from toolwise.protocols import Metrics
from toolwise.thinking.alternatives import mentions_action
from toolwise.thinking.format_metrics import format_metrics
from toolwise.thinking.level_scores import LevelScores
from toolwise.thinking.parsed_step import ParsedStep
from toolwise.types import LEVEL_COUNT, Alternative


def level_usage_metrics(steps: Sequence[ParsedStep]) -> Metrics:
    """Level usage over all steps, and per kind of step if the environment reports kinds."""
    if not steps:
        return {}
    metrics = format_metrics([step.reply for step in steps])
    metrics["thinking/tokens_per_step"] = _mean([step.thinking_tokens for step in steps])
    metrics["thinking/names_action"] = _mention_rate([(step.reply.thought, step.reply.action) for step in steps])
    for kind in sorted({step.kind for step in steps if step.kind is not None}):
        of_kind = [step for step in steps if step.kind == kind]
        levels = Counter(step.reply.level for step in of_kind if step.reply.level is not None)
        with_level = max(1, levels.total())
        metrics |= {f"thinking/{kind}/level_{k}_share": levels[k] / with_level for k in range(1, LEVEL_COUNT + 1)}
        metrics[f"thinking/{kind}/tokens_per_step"] = _mean([step.thinking_tokens for step in of_kind])
        metrics[f"thinking/{kind}/steps"] = float(len(of_kind))
    return metrics


def alternative_metrics(
    chosen: Sequence[ParsedStep], alternatives: Sequence[Sequence[Alternative]], scored: LevelScores, sampled: int
) -> Metrics:
    """`sampled` is the number of tokens sampled in the rollouts themselves."""
    pairs = [
        (step, alternative)
        for step, step_alternatives in zip(chosen, alternatives, strict=True)
        for alternative in step_alternatives
    ]
    generated_tokens = sum(alternative.generated_tokens for _, alternative in pairs)
    return {
        "thinking/steps_compared": float(len(chosen)),
        "thinking/groups": float(sum(group is not None for group in scored.groups)),
        "thinking/alternatives": float(len(pairs)),
        "thinking/failed_alternatives": float(sum(scored.failures.values())),
        **{f"thinking/failed/{why}": float(count) for why, count in sorted(scored.failures.items())},
        "thinking/alternatives_name_action": _mention_rate(
            [(alternative.thought, step.reply.action) for step, alternative in pairs if alternative.failure is None]
        ),
        "thinking/added_tokens": float(generated_tokens),
        "thinking/added_tokens_ratio": generated_tokens / max(1, sampled),
        "thinking/scored_tokens": float(scored.scored_tokens),
        "thinking/thought_gap": scored.thought_gap,
        "thinking/own_gap": scored.action_gap,
    }


def _mention_rate(pairs: Sequence[tuple[str | None, str | None]]) -> float:
    """Share of the thoughts that mention the action."""
    return _mean([float(mentions_action(thought, action)) for thought, action in pairs if thought is not None])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
