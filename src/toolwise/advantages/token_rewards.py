"""Token-level rewards: the step's reward at its last sampled token, and a KL penalty at every token.

    r_t = −kl_coef · (log π_old − log π_ref)  [+ the step's reward at its last sampled token]

The penalty is the k1 estimator, whose gradient is correct when it is part of the reward. The reward of a step without
sampled tokens goes to the last token before it, the decision that led to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from toolwise.advantages.arrays import CreditError, Doubles, Ints
from toolwise.advantages.assign import sampled_tokens
from toolwise.advantages.step_rewards import episodes_from_rollouts
from toolwise.types import AnnotatedRollout


@dataclass(frozen=True, slots=True)
class TokenRewards:
    """Rewards of the sampled tokens of all rollouts, concatenated."""

    rewards: Doubles
    counts: Ints
    """Sampled tokens per step, in rollout order."""
    rollout_of_step: Ints
    tokens_per_rollout: Ints


def token_rewards_of(rollouts: Sequence[AnnotatedRollout], *, kl_coef: float = 0.0, **settings: Any) -> TokenRewards:
    """`settings` are those of `episodes_of`."""
    episodes = episodes_from_rollouts(rollouts, **settings)
    counts = np.array([sampled_tokens(step) for r in rollouts for step in r.scored.steps], dtype=np.intp)
    rollout_of_step = episodes.rollout_of_step
    tokens_per_rollout = np.bincount(rollout_of_step, counts, len(rollouts)).astype(np.intp)
    rewards = np.zeros(int(counts.sum()))
    if kl_coef:
        rewards -= kl_coef * np.concatenate([rewards[:0], *(part for r in rollouts for part in token_k1(r))])
    token_ends = np.cumsum(counts)
    rollout_starts = np.cumsum(tokens_per_rollout) - tokens_per_rollout
    has_token = token_ends > rollout_starts[rollout_of_step]  # the rollout has a token at or before this step
    rewards += np.bincount(token_ends[has_token] - 1, episodes.rewards[has_token], len(rewards))
    return TokenRewards(rewards, counts, rollout_of_step, tokens_per_rollout)


def token_k1(rollout: AnnotatedRollout) -> list[Doubles]:
    """log π_old − log π_ref of each sampled token, one array per step."""
    name, steps = rollout.scored.rollout.rollout_id, rollout.scored.steps
    if rollout.ref_logprobs is None:
        raise CreditError(f"rollout {name} has no reference log-probs: the learner must annotate them")
    # If the learner did not recompute them, the sampling log-probs are the old ones.
    sampled: list[Any] = [step.tokens.logprobs for step in steps]
    parts = []
    for step, old, reference in zip(steps, rollout.old_logprobs or sampled, rollout.ref_logprobs, strict=True):
        if not len(old) == len(reference) == sampled_tokens(step):
            raise CreditError(
                f"rollout {name}, step {step.system_step_index}: {len(old)} old and {len(reference)} reference "
                f"log-probs for {sampled_tokens(step)} sampled tokens"
            )
        parts.append(np.asarray(old, dtype=np.float64) - np.asarray(reference, dtype=np.float64))
    return parts
