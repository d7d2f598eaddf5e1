"""From rollouts to rows of tokens by the exact-prefix rule.

A step whose prompt begins with everything its row already holds extends that row; any other step starts a new one. So a
multi-turn rollout is one row, and nothing the policy sampled is ever tokenised again. Only sampled tokens count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from toolwise.errors import PolicyError, ToolwiseError
from toolwise.types import CreditedRollout, ScoredRollout, StepData


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


def require_tokens(rollouts: Sequence[ScoredRollout]) -> None:
    """Refuse now, before anything is counted per token, to learn from a policy that gives text alone."""
    for scored in rollouts:
        for step in scored.steps if scored.trainable else ():
            if step.policy_logprobs is not None:
                _tokens_of(step, scored.rollout.rollout_id)


def _rows_of(rollout: CreditedRollout) -> Iterator[Row]:
    row: Row | None = None
    for step, advantages in zip(rollout.steps, rollout.advantages, strict=True):
        if step.policy_logprobs is None:
            continue
        prompt, sampled, logprobs = _tokens_of(step, rollout.rollout.rollout_id)
        if len(advantages) != len(sampled):
            raise ToolwiseError(
                f"rollout {rollout.rollout.rollout_id}, step {step.system_step_index}: the estimator gives "
                f"{len(advantages)} advantages for {len(sampled)} sampled tokens; give one for each"
            )
        if row is None or prompt[: len(row)] != row.ids:
            if row is not None:
                yield row
            row = Row(rollout.rollout.rollout_id, [], [], [], [])
        news = prompt[len(row) :]
        row.ids.extend(news)
        row.sampled.extend([False] * len(news))
        row.logprobs.extend([0.0] * len(news))
        row.advantages.extend([0.0] * len(news))
        row.ids.extend(sampled)
        row.sampled.extend([True] * len(sampled))
        row.logprobs.extend(logprobs)
        row.advantages.extend(advantages.tolist())
    if row is not None:
        yield row


def _tokens_of(step: StepData, rollout_id: str) -> tuple[list[int], list[int], list[float]]:
    """What the model saw, what it sampled, and with which log-probs; anything less cannot be learned from."""
    found = step.policy_logprobs or {}
    where = f"rollout {rollout_id}, step {step.system_step_index}"
    missing = [key for key in ("prompt_ids", "token_ids", "logprobs") if found.get(key) is None]
    if missing:
        raise PolicyError(
            f"{where}: the policy gives no {' and no '.join(missing)}, and text alone cannot be trained on: use the "
            "local policy, or a server that returns token ids and log-probs"
        )
    sampled, logprobs = list(found["token_ids"]), list(found["logprobs"])
    if len(sampled) != len(logprobs) or None in logprobs:
        raise PolicyError(f"{where}: {len(sampled)} sampled tokens, of which not each has a log-prob ({len(logprobs)})")
    return list(found["prompt_ids"]), sampled, logprobs


def split_by_tokens(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Micro-batches of rows of like length, each at most `max_tokens` when padded (one row may be longer alone)."""
    parts: list[list[Row]] = []
    for row in sorted(rows, key=len, reverse=True):
        if parts and (len(parts[-1]) + 1) * len(parts[-1][0]) <= max_tokens:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts
