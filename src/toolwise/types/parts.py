"""What is known about each sampled token after an update: the parts of its advantage, and what the learner computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from toolwise.types.thinking import Floats


@dataclass(frozen=True, slots=True)
class AdvantageParts:
    """What the advantages of a rollout consist of: at each sampled token, the product of `factors` times the sum of
    `parts`. Each array has one entry per sampled token, over all steps of the rollout."""

    parts: Mapping[str, NDArray[np.float64]]
    """By name: trajectory, step (against steps in the same state), thinking, price, kl, critic."""
    factors: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    """By name: group_scale (1 / standard deviation of the group), whitening (1 / that of the batch), reweighting."""
    anchors: tuple[int, ...] | None = None
    """The state of each step: equal numbers for steps that were compared with each other."""
    levels: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    """For each step whose thinking levels were compared: the advantage of each level; NaN marks a missing one."""


@dataclass(frozen=True, slots=True)
class UpdatedTokens:
    """What the learner computed for the sampled tokens of a rollout, before it changed any weight. Each array has one
    entry per sampled token, over all steps; NaN for tokens that are not trained on."""

    gaps: Floats
    """Log-prob by the learner minus log-prob by the policy that sampled the token."""
    entropies: Floats
    """Of the learner's distribution, in nats."""
    clipped: NDArray[np.bool_]
    """Whether the loss clipped or masked the token in any of the update's steps."""
