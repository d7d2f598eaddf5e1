"""HGPO: GiGPO that also compares steps by the states before them, since one state may have different histories.

Anchors are nested by the states of the last d steps, d = 0 … k; a step is compared at every depth where it has peers:

    H_d(t) = all steps of the group whose last d + 1 states (including their own) equal those of step t
    A_d(t) = normalized G over H_d(t)                        as in GiGPO
    A_S(t) = Σ_d w_d · A_d(t) / Σ_d w_d,   w_d = (d + 1)^α   over the depths d ≤ k with |H_d(t)| ≥ 2

Paper: He et al. 2026, arXiv 2602.22817.

Deeper groups are smaller and more homogeneous, and get more weight (α = 1; α = 0 weights all depths equally). A step
with fewer than d predecessors has no group at depth d. If no depth has peers, A_S is exactly 0; with k = 0, A_S equals
GiGPO's to the last bit. A_E and the combination are GiGPO's. With ω = 0 only A_S remains, as in the authors' code.
Shapes and grouping: as in `gigpo.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from toolwise.advantages.arrays import CreditError, Doubles, Ints, normalize, pair_codes
from toolwise.advantages.gigpo import Gigpo
from toolwise.config.algorithm import HgpoOptions, StepNormalization


def nested_state_advantages(
    returns: Doubles,
    states: Ints,
    lengths: Ints,
    mode: StepNormalization,
    scale_of: Doubles | None = None,
    *,
    k: int,
    alpha: float = 1.0,
) -> Doubles:
    """A_S over depths 0 … k. `states` holds one code per (group, state), `returns` one G per step. `scale_of`: as in
    `normalize`."""
    if len(returns) == 0:
        return np.zeros(0)
    predecessors = np.arange(len(returns)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    total, weights = np.zeros(len(returns)), np.zeros(len(returns))
    nested = states
    for depth in range(min(k, int(lengths.max()) - 1) + 1):
        deep = np.flatnonzero(predecessors >= depth)
        if depth:
            # The last d + 1 states: the last d of this step paired with the last d of the previous one.
            deeper, _ = pair_codes(nested[deep], nested[deep - 1])
            nested = np.zeros_like(nested)
            nested[deep] = deeper
        groups = nested[deep]
        peers = deep[np.bincount(groups)[groups] >= 2]
        weight = float(depth + 1) ** alpha
        advantage = np.zeros(len(returns))
        scales = None if scale_of is None else scale_of[deep]
        advantage[deep] = normalize(returns[deep], groups, mode, scale_of=scales)
        total[peers] += weight * advantage[peers]
        weights[peers] += weight
    return np.divide(total, weights, out=np.zeros(len(returns)), where=weights > 0)


@dataclass(frozen=True)
class Hgpo(HgpoOptions, Gigpo):
    """HGPO: `adv_estimator = "hgpo"`. k is `anchor_history`, α is `depth_alpha`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.anchor_history < 0:
            raise CreditError(f"anchor_history is {self.anchor_history}; use 0 (GiGPO) or more")

    def _step_advantages(
        self,
        returns: Doubles,
        states: Ints,
        lengths: Ints,
        mode: StepNormalization,
        scale_of: Doubles | None = None,
    ) -> Doubles:
        return nested_state_advantages(
            returns, states, lengths, mode, scale_of, k=self.anchor_history, alpha=self.depth_alpha
        )
