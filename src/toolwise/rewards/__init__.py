"""Reward functions over messages, how they run, and how their results align to rollout steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolwise.lazy_imports import lazy_names
from toolwise.rewards.function import Reward, reward_function

if TYPE_CHECKING:
    from toolwise.rewards.align import RLDataAligner

# Sandbox workers start often and do not align anything.
__getattr__ = lazy_names(__name__, {"toolwise.rewards.align": ["RLDataAligner"]})

__all__ = ["RLDataAligner", "Reward", "reward_function"]
