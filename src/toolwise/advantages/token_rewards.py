"""Token-level rewards: the step's reward at its last sampled token, and a KL penalty at every token.

    r_t = −β · (log π_old − log π_ref)  [+ the step's reward at its last sampled token]

β is the rollout's `kl_coef` (`costs.py`). The reward of a step without sampled tokens goes to the last token before it,
the decision that led to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from toolwise.advantages.arrays import Doubles, Ints
from toolwise.advantages.assign import sampled_tokens
from toolwise.advantages.costs import kl_token_costs
from toolwise.advantages.step_rewards import episodes_from_rollouts
from toolwise.types import AnnotatedRollout, RewardSettings


@dataclass(frozen=True, slots=True)
class TokenRewards:
    """Rewards of the sampled tokens of all rollouts, concatenated."""

    rewards: Doubles
    counts: Ints
    """Sampled tokens per step, in rollout order."""
    rollout_of_step: Ints
    tokens_per_rollout: Ints


def token_rewards_of(rollouts: Sequence[AnnotatedRollout], rewards: RewardSettings) -> TokenRewards:
    """Rewards of tokens minus their costs; thinking is charged to the step's last token, like its reward."""
    episodes = episodes_from_rollouts(rollouts, rewards, kl=False)
    counts = np.array([sampled_tokens(step) for r in rollouts for step in r.scored.steps], dtype=np.intp)
    rollout_of_step = episodes.rollout_of_step
    tokens_per_rollout = np.bincount(rollout_of_step, counts, len(rollouts)).astype(np.intp)
    token_rewards = np.zeros(int(counts.sum()))
    if (kl := kl_token_costs(rollouts)) is not None:
        token_rewards -= kl
    token_ends = np.cumsum(counts)
    rollout_starts = np.cumsum(tokens_per_rollout) - tokens_per_rollout
    has_token = token_ends > rollout_starts[rollout_of_step]  # the rollout has a token at or before this step
    token_rewards += np.bincount(token_ends[has_token] - 1, episodes.rewards[has_token], len(token_rewards))
    return TokenRewards(token_rewards, counts, rollout_of_step, tokens_per_rollout)
