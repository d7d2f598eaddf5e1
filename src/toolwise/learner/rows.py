"""From rollouts to rows of tokens by the exact-prefix rule.

A step whose prompt begins with everything its row already holds extends that row; any other step starts a new one. So a
multi-turn rollout is one row, and nothing the policy sampled is ever tokenised again. Only sampled tokens count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from toolwise.types import CreditedRollout


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence to learn from. All four lists have the same length."""

    rollout_id: str
    ids: list[int]
    sampled: list[bool]
    logprobs: list[float]
    """What the policy gave each sampled token; 0 elsewhere."""
    advantages: list[float]

    def __len__(self) -> int:
        return len(self.ids)


def build_rows(rollouts: Sequence[CreditedRollout]) -> list[Row]:
    return [row for rollout in rollouts for row in _rows_of(rollout)]


def _rows_of(rollout: CreditedRollout) -> Iterator[Row]:
    row: Row | None = None
    for step, advantages in zip(rollout.steps, rollout.advantages, strict=True):
        tokens = step.policy_logprobs
        if tokens is None:
            continue
        prompt = list(tokens["prompt_ids"])
        if row is None or prompt[: len(row)] != row.ids:
            if row is not None:
                yield row
            row = Row(rollout.rollout.rollout_id, [], [], [], [])
        news = prompt[len(row) :]
        row.ids.extend(news)
        row.sampled.extend([False] * len(news))
        row.logprobs.extend([0.0] * len(news))
        row.advantages.extend([0.0] * len(news))
        row.ids.extend(tokens["token_ids"])
        row.sampled.extend([True] * len(tokens["token_ids"]))
        row.logprobs.extend(tokens["logprobs"])
        row.advantages.extend(advantages.tolist())
    if row is not None:
        yield row


def split_by_tokens(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Micro-batches of rows of like length, each at most `max_tokens` when padded (one row may be longer alone)."""
    parts: list[list[Row]] = []
    for row in sorted(rows, key=len, reverse=True):
        if parts and (len(parts[-1]) + 1) * len(parts[-1][0]) <= max_tokens:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts
