"""Costs that rewards include. A rollout carries them from the start; its score and step rewards stay as they are.

    thinking   a rollout of n steps pays λ · Σ t_i / n, each step for its own t_i thinking tokens (`RolloutThinking`)
    KL         each sampled token pays β · (log π_old − log π_ref), the k1 estimator (`AnnotatedRollout.kl_coef`), whose
               gradient is correct when it is part of the reward

A cost reduces the reward of its step or token, and the total of its rollout. An estimator that computes rewards with
`total_rewards`, `episodes_from_rollouts` (`step_rewards.py`) or `token_rewards_of` (`token_rewards.py`) charges them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from toolwise.advantages.arrays import CreditError, Doubles
from toolwise.advantages.assign import sampled_tokens
from toolwise.protocols import Metrics
from toolwise.types import AnnotatedRollout


def thinking_costs(rollouts: Sequence[AnnotatedRollout]) -> Doubles | None:
    """The cost of each step, in rollout order; None if thinking costs nothing."""
    if not any(r.thinking is not None and r.thinking.charged for r in rollouts):
        return None
    costs = [() if r.thinking is None else r.thinking.step_costs for r in rollouts]
    parts = [part or (0.0,) * len(r.scored.steps) for part, r in zip(costs, rollouts, strict=True)]
    return np.array([cost for part in parts for cost in part])


def kl_step_costs(rollouts: Sequence[AnnotatedRollout]) -> Doubles | None:
    """The cost of each step, in rollout order; None if KL costs nothing."""
    if not any(r.kl_coef for r in rollouts):
        return None
    return np.array([(r.kl_coef or 0.0) * float(part.sum()) for r in rollouts for part in token_k1(r)])


def kl_token_costs(rollouts: Sequence[AnnotatedRollout]) -> Doubles | None:
    """The cost of each sampled token, in rollout order; None if KL costs nothing."""
    if not any(r.kl_coef for r in rollouts):
        return None
    return np.concatenate([np.zeros(0), *((r.kl_coef or 0.0) * part for r in rollouts for part in token_k1(r))])


def kl_cost(rollout: AnnotatedRollout) -> float:
    """The cost of a whole rollout."""
    return rollout.kl_coef * float(sum(part.sum() for part in token_k1(rollout))) if rollout.kl_coef else 0.0


def cost_metrics(rollouts: Sequence[AnnotatedRollout]) -> Metrics:
    """The mean KL cost of a rollout, if it is part of the reward."""
    costs = [kl_cost(r) for r in rollouts if r.kl_coef is not None]
    return {"kl/cost": float(np.mean(costs))} if costs else {}


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
