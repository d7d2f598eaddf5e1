"""What each sampled token earned: the step's reward with its last token, and a price for leaving the reference.

    r_t = −kl_coef · (log π_old − log π_ref)  [+ the step's reward at its last sampled token]

The price is the estimator k1, which gives the right gradient when it stands in the reward. A step without sampled
tokens passes its reward on to the last token before it: that is the decision it came of.
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
    """The sampled tokens of all rollouts, end to end."""

    rewards: Doubles
    counts: Ints
    """Sampled tokens a step, rollout after rollout."""
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
    before = np.cumsum(counts)
    begins = np.cumsum(tokens_per_rollout) - tokens_per_rollout
    spoken = before > begins[rollout_of_step]  # the rollout has a token at or before this step
    rewards += np.bincount(before[spoken] - 1, episodes.rewards[spoken], len(rewards))
    return TokenRewards(rewards, counts, rollout_of_step, tokens_per_rollout)


def token_k1(rollout: AnnotatedRollout) -> list[Doubles]:
    """log π_old − log π_ref of each sampled token, an array a step."""
    name, steps = rollout.scored.rollout.rollout_id, rollout.scored.steps
    if rollout.ref_logprobs is None:
        raise CreditError(f"rollout {name} has no reference log-probs: the learner must annotate them")
    # Where the learner took none again, the log-probs the tokens were drawn with are the old ones.
    drawn = [(step.policy_logprobs or {}).get("logprobs", ()) for step in steps]
    parts = []
    for step, now, reference in zip(steps, rollout.old_logprobs or drawn, rollout.ref_logprobs, strict=True):
        if not len(now) == len(reference) == sampled_tokens(step):
            raise CreditError(
                f"rollout {name}, step {step.system_step_index}: {len(now)} old and {len(reference)} reference "
                f"log-probs for {sampled_tokens(step)} sampled tokens"
            )
        parts.append(np.asarray(now, dtype=np.float64) - np.asarray(reference, dtype=np.float64))
    return parts
