"""An environment: what an agent acts in for one episode. Edit it, then check it before you train:

toolwise check env my_env.py:MyEnv

In a configuration: env = { name = "my_env.py:MyEnv" }, and reward = { function = "env" } for the rewards of its steps.
"""

import random
from typing import Any

from toolwise import BaseEnv


class MyEnv(BaseEnv):
    """A number to guess. `highest` is an option: set it in `env.kwargs`."""

    def __init__(self, highest: int = 20) -> None:
        self.low, self.high, self.number, self.over = 1, highest, 1, False

    def set_seed(self, seed: int) -> None:
        """All rollouts of a task get the same seed, so that they can be compared."""
        self.number = random.Random(seed).randint(self.low, self.high)

    async def reset(self) -> str:
        return f"I think of a number from {self.low} to {self.high}. Reply with a number and nothing else."

    async def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        """Returns what the agent reads next, the reward of this step, whether the episode is over, and the info."""
        if self.over:
            raise RuntimeError("the episode is over")
        text = str(action).strip()
        if not (text.isascii() and text.isdecimal() and len(text) < 10):
            return "Reply with a number.", 0.0, False, {"is_action_valid": False}
        guess = int(text)
        if guess == self.number:
            self.over = True
            return "Right!", 1.0, True, {"success": True}
        if guess < self.number:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        return "Higher." if guess < self.number else "Lower.", -0.05, False, {}

    @property
    def state_key(self) -> str:
        """Equal where the state is equal: step-level credit compares what was done in the same state."""
        return f"{self.low}-{self.high}"

    def gold_actions(self) -> list[Any]:
        """For the check: actions that reach the goal."""
        return [str(self.number)]

    def example_actions(self) -> list[Any]:
        """For the check: a few valid actions."""
        return ["1", "10", "20"]
