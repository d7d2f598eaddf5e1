"""GRPO (Shao et al. 2024, arXiv 2402.03300): a rollout is as good as it beats the others of its own task.

    A_i = (r_i − mean(r)) / (std(r) + ε)       over the rollouts of one group, sample std
    A_i = r_i − mean(r)                        with norm_by_std = False (Dr. GRPO, arXiv 2503.20783)

Every sampled token of rollout i gets A_i. A group of one, and a group whose rewards are all equal, gives exactly 0.
Statistics in float64, over groups alone: nothing outside a group can change its advantages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from toolwise.types import AnnotatedRollout, CreditedRollout

if TYPE_CHECKING:
    import torch

EPSILON = 1e-6
Floats64 = np.ndarray[Any, np.dtype[np.float64]]


def group_advantages(scores: Sequence[float], groups: Sequence[Any], *, norm_by_std: bool = True) -> Floats64:
    """One advantage a score, normalised within its group."""
    x = np.asarray(scores, dtype=np.float64)
    if len(x) == 0:
        return x
    _, inverse = np.unique(np.asarray([str(g) for g in groups]), return_inverse=True)
    count = np.bincount(inverse)
    lowest = np.full(len(count), np.inf)
    highest = np.full(len(count), -np.inf)
    np.minimum.at(lowest, inverse, x)
    np.maximum.at(highest, inverse, x)
    centred = x - (np.bincount(inverse, x) / count)[inverse]
    # Rounding leaves 7 × 0.1 a hair off its own mean; equal rewards must say nothing at all.
    centred[(lowest == highest)[inverse]] = 0.0
    if not norm_by_std:
        return centred
    variance = np.bincount(inverse, centred**2) / np.maximum(count - 1, 1)
    return np.asarray(centred / (np.sqrt(variance)[inverse] + EPSILON))


@dataclass(frozen=True, slots=True)
class Grpo:
    """`adv_estimator = "grpo"`"""

    norm_by_std: bool = True

    needs: ClassVar[frozenset[Literal["old_logprobs", "ref_logprobs", "values"]]] = frozenset()

    def __call__(self, rollouts: Sequence[AnnotatedRollout]) -> list[CreditedRollout]:
        scores = [r.scored.score for r in rollouts]
        groups = [r.scored.rollout.group_id for r in rollouts]
        advantages = group_advantages(scores, groups, norm_by_std=self.norm_by_std)
        return [credit_whole(rollout, float(a)) for rollout, a in zip(rollouts, advantages, strict=True)]


def credit_whole(rollout: AnnotatedRollout, advantage: float) -> CreditedRollout:
    """The same advantage for every step and every sampled token."""
    steps = rollout.scored.steps
    lengths = [len(s.policy_logprobs["token_ids"]) if s.policy_logprobs else 0 for s in steps]
    return CreditedRollout(
        rollout,
        tuple(step.model_copy(update={"advantage": advantage}) for step in steps),
        tuple(np.full(length, advantage, dtype=np.float32) for length in lengths),
    )


def compute_grpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Sequence[Any],
    *,
    norm_by_std: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same over tensors [batch, length]: a row's score is the sum of its token rewards under the mask, `index`
    names its group; gives (advantages, returns), equal for outcome rewards, zero off the mask."""
    import torch

    if token_level_rewards.shape != response_mask.shape or len(index) != len(token_level_rewards):
        raise ValueError(
            f"shapes differ: rewards {tuple(token_level_rewards.shape)}, mask {tuple(response_mask.shape)}, "
            f"index {len(index)}"
        )
    # Whole-number rewards must not cut advantages down to whole numbers.
    dtype = token_level_rewards.dtype if token_level_rewards.is_floating_point() else torch.float32
    mask = response_mask.to(dtype)
    scores = torch.where(response_mask.bool(), token_level_rewards, 0.0).double().sum(-1)
    advantages = group_advantages(scores.tolist(), index, norm_by_std=norm_by_std)
    spread = torch.as_tensor(advantages, dtype=mask.dtype, device=mask.device)[:, None] * mask
    return spread, spread.clone()
