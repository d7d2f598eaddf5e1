"""Turns rollouts into rows of tokens by the exact-prefix rule.

A step whose prompt starts with all tokens of the current row extends that row; any other step starts a new one. So a
multi-turn rollout is usually one row, and sampled tokens are never re-tokenised. Only sampled tokens are trained on.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from toolwise.errors import PolicyError, ToolwiseError
from toolwise.messages import Prefix
from toolwise.types import CreditedRollout, ScoredRollout, StepData
from toolwise.types.tokens import SampledTokens


@dataclass(frozen=True, slots=True)
class Row:
    """One training sequence. All four lists have the same length."""

    rollout_id: str
    ids: list[int]
    sampled: list[bool]
    logprobs: list[float]
    """The policy's log-prob of each sampled token; 0 elsewhere."""
    advantages: list[float]

    def __len__(self) -> int:
        return len(self.ids)


def build_rows(rollouts: Sequence[CreditedRollout]) -> list[Row]:
    return [row for rollout in rollouts for row in _rows_of(rollout)]


def require_tokens(rollouts: Sequence[ScoredRollout]) -> None:
    """Raise early if the policy returned text without token ids and log-probs."""
    for scored in rollouts:
        for step in scored.steps if scored.trainable else ():
            if step.policy_logprobs is not None:
                _require_ids(step, scored.rollout.rollout_id)


def _rows_of(rollout: CreditedRollout) -> Iterator[Row]:
    row: Row | None = None
    for step, advantages in zip(rollout.steps, rollout.advantages, strict=True):
        if step.policy_logprobs is None:
            continue
        prompt, sampled, logprobs = _tokens_of(step, rollout.rollout.rollout_id)
        if len(advantages) != len(sampled):
            raise ToolwiseError(
                f"rollout {rollout.rollout.rollout_id}, step {step.system_step_index}: the estimator returned "
                f"{len(advantages)} advantages for {len(sampled)} sampled tokens; it must return one per token"
            )
        if row is None or prompt[: len(row)] != row.ids:
            if row is not None:
                yield row
            row = Row(rollout.rollout.rollout_id, [], [], [], [])
        new_ids = prompt[len(row) :]
        row.ids.extend(new_ids)
        row.sampled.extend([False] * len(new_ids))
        row.logprobs.extend([0.0] * len(new_ids))
        row.advantages.extend([0.0] * len(new_ids))
        row.ids.extend(sampled)
        row.sampled.extend([True] * len(sampled))
        row.logprobs.extend(logprobs)
        row.advantages.extend(advantages.tolist())
    if row is not None:
        yield row


def _tokens_of(step: StepData, rollout_id: str) -> tuple[list[int], list[int], list[float]]:
    """The step's prompt ids, sampled ids and log-probs; raises if the policy returned none."""
    tokens = _require_ids(step, rollout_id)
    return _as_list(tokens.prompt_ids), _as_list(tokens.token_ids), _as_list(tokens.logprobs)


def _as_list(values: Sequence[Any]) -> list[Any]:
    return values.tolist() if isinstance(values, array | Prefix) else list(values)


def _require_ids(step: StepData, rollout_id: str) -> SampledTokens:
    tokens = step.tokens
    if not tokens.has_ids:
        raise PolicyError(
            f"rollout {rollout_id}, step {step.system_step_index}: the policy returned no token ids and log-probs, and "
            "training needs them: use the local policy, or a server that returns them"
        )
    return tokens
