"""Within the four: what a thinking level was worth for an action, as arrays [steps, levels] in which nan is a level
that is not there. Over `rlvcr.py`'s typed groups and over tensors alike.

    u_l       = score_l − λ·tokens_l + bonus_l          before centring: afterwards a price would press on all levels
    A_think   = u_used − mean(u)                        mode = "mean_norm"
    A_think   = (u_used − mean(u)) / (std(u) + 1e-6)    mode = "mean_std_norm", sample std
    w_l       = exp(2·n_l) / mean exp(2·n)              n: c_l = exp(u_l) from its least (0) to its greatest (1)

score: the mean log-prob of the action's tokens, its exponential ("confidence"), or minus their mean entropy. Fewer
than two levels, or all alike: exactly 0, and weights of 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from toolwise.advantages.arrays import Doubles, Ints, normalize

LevelNormalization = Literal["mean_norm", "mean_std_norm"]
LevelScoreKind = Literal["logprob", "confidence", "neg_entropy"]
LEVEL_COUNT = 4
MIN_SPREAD_NATS = 0.05
"""A spread of scores below this is noise, and must not be stretched to the whole range."""


def level_scores(logprobs: Doubles, entropies: Doubles, score: LevelScoreKind) -> Doubles:
    """What is compared, from the mean log-probs and the mean entropies."""
    if score == "neg_entropy":
        return np.asarray(-entropies)
    return np.asarray(np.exp(logprobs)) if score == "confidence" else logprobs


def diversity_bonus(levels: Sequence[int | None], groups: Sequence[str]) -> dict[str, Doubles]:
    """group -> 1 − the share of each level among the group's steps. One level and one group id a step."""
    counts: dict[str, Doubles] = {}
    for level, group in zip(levels, groups, strict=True):
        of_group = counts.setdefault(group, np.zeros(LEVEL_COUNT))
        if level is not None:
            of_group[level - 1] += 1
    return {group: 1.0 - count / max(1.0, count.sum()) for group, count in counts.items()}


def used_level_advantages(utilities: Doubles, used: Ints, mode: LevelNormalization = "mean_norm") -> Doubles:
    """A_think of each step: its used level within its levels. `used` are places from 0."""
    there = np.isfinite(utilities)
    flat = normalize(utilities[there], np.nonzero(there)[0], mode)
    spread = np.zeros(utilities.shape)
    spread[there] = flat
    return np.asarray(spread[np.arange(len(used)), used])


def level_advantages(utilities: Doubles, mode: LevelNormalization = "mean_norm") -> Doubles:
    """The same of every level, nan where there is none."""
    there = np.isfinite(utilities)
    spread = np.full(utilities.shape, np.nan)
    spread[there] = normalize(utilities[there], np.nonzero(there)[0], mode)
    return spread


def copo_weights(utilities: Doubles, score: LevelScoreKind = "logprob", *, floor: float = MIN_SPREAD_NATS) -> Doubles:
    """w of every level, of mean 1 in each step; nan in steps of which not all levels are there."""
    weights = np.full(utilities.shape, np.nan)
    whole = np.isfinite(utilities).all(1)
    u = utilities[whole]
    if len(u) == 0:
        return weights
    c = np.exp(u - u.max(1, keepdims=True)) if score == "logprob" else u  # min-max does not see a common factor
    low, high = c.min(1, keepdims=True), c.max(1, keepdims=True)
    flat = (np.ptp(u, axis=1) < floor)[:, None] | (high <= low)
    n = np.where(flat, 0.5, (c - low) / np.where(flat, 1.0, high - low))
    grown = np.exp(2.0 * n)
    weights[whole] = grown / grown.mean(1, keepdims=True)
    return weights
