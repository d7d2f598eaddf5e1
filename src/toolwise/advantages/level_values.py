"""The value of each thinking level for an action, as arrays [steps, levels]; NaN marks a missing level.

Shared by `rlvcr.py` and `rlvcr_tensors.py`.

    u_l       = score_l − λ·tokens_l + bonus_l          before centering: afterwards the cost would penalize all levels
    A_think   = u_used − mean(u)                        mode = "mean_norm"
    A_think   = (u_used − mean(u)) / (std(u) + 1e-6)    mode = "mean_std_norm", sample std
    w_l       = exp(2·n_l) / mean exp(2·n)              n: c_l = exp(u_l), min-max scaled to [0, 1]

score: the mean log-prob of the action's tokens, its exponential ("confidence"), or minus their mean entropy. With fewer
than two levels, or equal values, A_think is exactly 0 and the weights are 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from toolwise.advantages.arrays import Doubles, normalize
from toolwise.types import LEVEL_COUNT

LevelNormalization = Literal["mean_norm", "mean_std_norm"]
LevelScoreKind = Literal["logprob", "confidence", "neg_entropy"]
MIN_SPREAD_NATS = 0.05
"""A smaller spread of scores is noise and must not be scaled up to the full range."""


def level_scores(logprobs: Doubles, entropies: Doubles, score: LevelScoreKind) -> Doubles:
    """The score of each level from its mean log-prob or mean entropy."""
    if score == "neg_entropy":
        return np.asarray(-entropies)
    return np.asarray(np.exp(logprobs)) if score == "confidence" else logprobs


def diversity_bonus(levels: Sequence[int | None], groups: Sequence[str]) -> dict[str, Doubles]:
    """Maps each group to 1 − the share of each level among its steps. Takes one level and one group id per step."""
    counts: dict[str, Doubles] = {}
    for level, group in zip(levels, groups, strict=True):
        group_counts = counts.setdefault(group, np.zeros(LEVEL_COUNT))
        if level is not None:
            group_counts[level - 1] += 1
    return {group: 1.0 - count / max(1.0, count.sum()) for group, count in counts.items()}


def level_advantages(utilities: Doubles, mode: LevelNormalization = "mean_norm") -> Doubles:
    """A_think of every level; NaN for missing levels."""
    present = np.isfinite(utilities)
    advantages = np.full(utilities.shape, np.nan)
    advantages[present] = normalize(utilities[present], np.nonzero(present)[0], mode)
    return advantages


def copo_weights(utilities: Doubles, score: LevelScoreKind = "logprob", *, floor: float = MIN_SPREAD_NATS) -> Doubles:
    """w of every level, with mean 1 in each step; NaN in steps with missing levels."""
    weights = np.full(utilities.shape, np.nan)
    complete = np.isfinite(utilities).all(1)
    u = utilities[complete]
    if len(u) == 0:
        return weights
    c = np.exp(u - u.max(1, keepdims=True)) if score == "logprob" else u  # min-max ignores a common factor
    low, high = c.min(1, keepdims=True), c.max(1, keepdims=True)
    flat = (np.ptp(u, axis=1) < floor)[:, None] | (high <= low)
    n = np.where(flat, 0.5, (c - low) / np.where(flat, 1.0, high - low))
    scaled = np.exp(2.0 * n)
    weights[complete] = scaled / scaled.mean(1, keepdims=True)
    return weights
