"""REINFORCE++: no critic and no groups; returns are normalized over the whole batch.

    G_t = r_t + γ · G_{t+1}                    over the sampled tokens of a rollout, γ = 1
    A_t = (G_t − mean(G)) / √(var(G) + 1e-8)   over all sampled tokens of the batch, sample variance

Paper: Hu et al. 2025, arXiv 2501.03262.

r_t is the token's reward (`step_rewards.py`): the step's reward at its last token and, if KL is in the reward, its
cost at every token. Tool tokens are not time steps. A batch of equal returns gives exactly 0.

Shapes: [batch, length] in `compute_reinforce_plus_plus_outcome_advantage`; over rollouts, one array per step with one
entry per sampled token. Grouping: none, so longer rollouts weigh more in the statistics, and tasks of different
difficulty are compared with each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from toolwise.advantages.arrays import Array, TokenMask, check_fraction, discounted_sums, whiten, whitening_factor
from toolwise.advantages.assign import credit_tokens
from toolwise.advantages.parts import attach_parts
from toolwise.advantages.step_rewards import BuiltinEstimator, token_reward_parts, token_rewards_of
from toolwise.types import AnnotatedRollout, CreditedBatch


def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Array, response_mask: Any, gamma: float = 1.0
) -> tuple[Array, Array]:
    """REINFORCE++ over arrays or tensors [batch, length]: (advantages, returns), both zero off the mask."""
    check_fraction("gamma", gamma)
    mask = TokenMask.of(response_mask, rewards=token_level_rewards)
    returns = discounted_sums(mask.gather(token_level_rewards), mask.lengths, gamma)
    return mask.scatter(whiten(returns), token_level_rewards), mask.scatter(returns, token_level_rewards)


@dataclass(frozen=True)
class ReinforcePlusPlus(BuiltinEstimator):
    """REINFORCE++: `adv_estimator = "reinforce_plus_plus"`."""

    gamma: float = 1.0

    uses_step_rewards: ClassVar[bool] = True
    min_group_size: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_fraction("gamma", self.gamma)
        super().__post_init__()

    def learns_from_equal_scores(self, score: float) -> bool:
        return True

    def __call__(self, rollouts: Sequence[AnnotatedRollout]) -> CreditedBatch:
        tokens = token_rewards_of(rollouts, self.rewards)
        returns = discounted_sums(tokens.rewards, tokens.tokens_per_rollout, self.gamma)
        credited = credit_tokens(rollouts, tokens.counts, whiten(returns), returns)
        sums = {
            name: discounted_sums(values, tokens.tokens_per_rollout, self.gamma)
            for name, values in token_reward_parts(rollouts, self.rewards, tokens).items()
        }
        parts = {name: values - values.mean() if len(values) else values for name, values in sums.items()}
        factor = np.full(len(returns), whitening_factor(returns))
        return CreditedBatch(attach_parts(credited, parts, {"whitening": factor}, per="token"))
