"""Reward functions over messages, how they run, and how their results align to rollout steps."""

from toolwise.rewards.align import RLDataAligner
from toolwise.rewards.function import Reward, reward_function

__all__ = ["RLDataAligner", "Reward", "reward_function"]
