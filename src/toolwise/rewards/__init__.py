"""What a rollout is worth: reward functions over messages, and their alignment to steps."""

from toolwise.rewards.align import RLDataAligner
from toolwise.rewards.function import Reward, reward_function

__all__ = ["RLDataAligner", "Reward", "reward_function"]
