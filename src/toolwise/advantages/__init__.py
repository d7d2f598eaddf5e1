"""Credit: one file an estimator, each its own configuration; adding one is a file, a line here and a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from toolwise.advantages.grpo import Grpo, compute_grpo_outcome_advantage

if TYPE_CHECKING:
    from toolwise.protocols import AdvantageEstimator

ESTIMATORS: dict[str, Callable[..., AdvantageEstimator]] = {"grpo": Grpo}

__all__ = ["ESTIMATORS", "Grpo", "compute_grpo_outcome_advantage"]
