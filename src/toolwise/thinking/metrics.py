"""What the thinking stage reports: how often each level was used and where, what thoughts cost, what went wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from toolwise.protocols import Metrics
from toolwise.thinking.alternatives import mentions_action
from toolwise.thinking.format_metrics import format_metrics
from toolwise.thinking.level_scores import LevelScores
from toolwise.thinking.levels import LEVEL_COUNT
from toolwise.thinking.parsed_step import ParsedStep
from toolwise.types import Alternative


def level_usage_metrics(steps: Sequence[ParsedStep]) -> Metrics:
    """Of all steps, and of each kind where the world tells kinds apart."""
    if not steps:
        return {}
    found = format_metrics([step.reading for step in steps])
    found["thinking/tokens_per_step"] = _mean([step.thinking_tokens for step in steps])
    found["thinking/names_action"] = _mention_rate([(step.reading.thought, step.reading.action) for step in steps])
    for kind in sorted({step.kind for step in steps if step.kind is not None}):
        of_kind = [step for step in steps if step.kind == kind]
        levels = Counter(step.reading.level for step in of_kind if step.reading.level is not None)
        told = max(1, levels.total())
        found |= {f"thinking/{kind}/level_{k}_share": levels[k] / told for k in range(1, LEVEL_COUNT + 1)}
        found[f"thinking/{kind}/tokens_per_step"] = _mean([step.thinking_tokens for step in of_kind])
        found[f"thinking/{kind}/steps"] = float(len(of_kind))
    return found


def alternative_metrics(
    chosen: Sequence[ParsedStep], alternatives: Sequence[Sequence[Alternative]], scored: LevelScores, sampled: int
) -> Metrics:
    """`sampled` tokens were drawn in the rollouts themselves."""
    pairs = [(step, other) for step, others in zip(chosen, alternatives, strict=True) for other in others]
    generated_tokens = sum(other.generated_tokens for _, other in pairs)
    return {
        "thinking/steps_compared": float(len(chosen)),
        "thinking/groups": float(sum(group is not None for group in scored.groups)),
        "thinking/alternatives": float(len(pairs)),
        "thinking/failed_alternatives": float(sum(scored.failures.values())),
        **{f"thinking/failed/{why}": float(count) for why, count in sorted(scored.failures.items())},
        "thinking/alternatives_name_action": _mention_rate(
            [(other.thought, step.reading.action) for step, other in pairs if other.failure is None]
        ),
        "thinking/added_tokens": float(generated_tokens),
        "thinking/added_tokens_ratio": generated_tokens / max(1, sampled),
        "thinking/scored_tokens": float(scored.scored_tokens),
        "thinking/thought_gap": scored.thought_gap,
        "thinking/own_gap": scored.action_gap,
    }


def _mention_rate(said: Sequence[tuple[str | None, str | None]]) -> float:
    """Of the thoughts there are, how many say the action."""
    return _mean([float(mentions_action(thought, action)) for thought, action in said if thought is not None])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
