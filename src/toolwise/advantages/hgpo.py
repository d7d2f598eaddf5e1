"""HGPO (He et al. 2026, arXiv 2602.22817): GiGPO where the same state can be reached with different things behind it.

Anchors are nested by the states of the last d steps, d = 0 … k; a step is compared at every depth it has company at:

    H_d(t) = all steps of the group whose last d + 1 states (their own included) equal those of step t
    A_d(t) = normalised G over H_d(t)                        as in GiGPO
    A_S(t) = Σ_d w_d · A_d(t) / Σ_d w_d,   w_d = (d + 1)^α   over the depths d ≤ k with |H_d(t)| ≥ 2

Deeper groups are smaller and more alike, and weigh more (α = 1; 0 weighs all alike). A step with fewer than d steps
behind it has no group at depth d. With no depth left, A_S is exactly 0; with k = 0, A_S is GiGPO's to the last bit. A_E
and the way both are combined are GiGPO's, too; ω = 0 leaves A_S alone, which is what the authors' code trains on.
Shapes and grouping: as in `gigpo.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from toolwise.advantages.arrays import CreditError, Doubles, Ints, normalize, pair_codes
from toolwise.advantages.gigpo import Gigpo, StepNormalization


def nested_state_advantages(
    returns: Doubles, states: Ints, lengths: Ints, how: StepNormalization, *, k: int, alpha: float = 1.0
) -> Doubles:
    """A_S over depths 0 … k. `states` has one number a (group, state), `returns` one G a step."""
    if len(returns) == 0:
        return np.zeros(0)
    behind = np.arange(len(returns)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    total, weights = np.zeros(len(returns)), np.zeros(len(returns))
    nested = states
    for depth in range(min(k, int(lengths.max()) - 1) + 1):
        deep = np.flatnonzero(behind >= depth)
        if depth:
            # The last d + 1 states: the last d of this step and the last d of the one before it.
            deeper, _ = pair_codes(nested[deep], nested[deep - 1])
            nested = np.zeros_like(nested)
            nested[deep] = deeper
        groups = nested[deep]
        met = deep[np.bincount(groups)[groups] >= 2]
        weight = float(depth + 1) ** alpha
        advantage = np.zeros(len(returns))
        advantage[deep] = normalize(returns[deep], groups, how)
        total[met] += weight * advantage[met]
        weights[met] += weight
    return np.divide(total, weights, out=np.zeros(len(returns)), where=weights > 0)


@dataclass(frozen=True, slots=True)
class Hgpo(Gigpo):
    """`adv_estimator = "hgpo"`"""

    anchor_history: int = 2
    """k: how many steps back anchors may be told apart."""
    depth_alpha: float = 1.0
    """How much more a deeper group weighs."""

    def __post_init__(self) -> None:
        Gigpo.__post_init__(self)  # super() would look for the class as it was before it got its slots
        if self.anchor_history < 0:
            raise CreditError(f"anchor_history is {self.anchor_history}; use 0 (GiGPO) or more")

    def _step_advantages(self, returns: Doubles, states: Ints, lengths: Ints, how: StepNormalization) -> Doubles:
        return nested_state_advantages(returns, states, lengths, how, k=self.anchor_history, alpha=self.depth_alpha)
