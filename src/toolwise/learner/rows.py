"""Turns rollouts into rows of tokens by the exact-prefix rule.

A step whose prompt starts with all tokens of the current row extends that row; any other step starts a new one. So a
multi-turn rollout is usually one row, and sampled tokens are never re-tokenised. Only sampled tokens are trained on.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toolwise.errors import PolicyError, ToolwiseError
from toolwise.messages import Prefix
from toolwise.types import CreditedRollout, ScoredRollout, StepData
from toolwise.types.tokens import SampledTokens


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One training sequence."""

    rollout_id: str
    ids: NDArray[np.int64]
    sampled: NDArray[np.bool_]
    """Which of the tokens the policy sampled."""

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
    ids: list[NDArray[np.int64]] = []
    """Of the row so far, in parts: every other one was sampled."""
    for step, advantages in zip(rollout.steps, rollout.advantages, strict=True):
        if step.policy_logprobs is None:
            continue
        tokens = _require_ids(step, rollout.rollout.rollout_id)
        prompt, sampled = _ids(tokens.prompt_ids), _ids(tokens.token_ids)
        if len(advantages) != len(sampled):
            raise ToolwiseError(
                f"rollout {rollout.rollout.rollout_id}, step {step.system_step_index}: the estimator returned "
                f"{len(advantages)} advantages for {len(sampled)} sampled tokens; it must return one per token"
            )
        held = sum(map(len, ids))
        if ids and not (len(prompt) >= held and np.array_equal(prompt[:held], np.concatenate(ids))):
            yield _row(rollout, ids)
            ids, held = [], 0
        ids += [prompt[held:], sampled]
    if ids:
        yield _row(rollout, ids)


def _row(rollout: CreditedRollout, ids: Sequence[NDArray[np.int64]]) -> Row:
    sampled = np.repeat(np.arange(len(ids)) % 2 == 1, [len(part) for part in ids])
    return Row(rollout.rollout.rollout_id, np.concatenate(ids), sampled)


def _ids(values: Sequence[int]) -> NDArray[np.int64]:
    if isinstance(values, Prefix):
        values = values.tolist()
    return np.array(values if isinstance(values, array) else list(values), dtype=np.int64)


def _require_ids(step: StepData, rollout_id: str) -> SampledTokens:
    tokens = step.tokens
    if not tokens.has_ids:
        raise PolicyError(
            f"rollout {rollout_id}, step {step.system_step_index}: the policy returned no token ids and log-probs, and "
            "training needs them: use the local policy, or a server that returns them"
        )
    return tokens
