"""What an agent acts in. An environment is used for one episode and then closed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from toolwise.messages import Message

Observation = str | Sequence[Message]


class BaseEnv(ABC):
    """One episode's world.

    `reset` gives what the agent first sees beyond the task's prompt ("" for nothing). `step` gives (observation,
    reward, done, info); an episode cut short says so with `info["truncated"]`. A plain string becomes a user message.
    """

    structured_actions: ClassVar[bool] = False
    """False: `step` gets the text the agent wrote. True: it gets the whole action dictionary."""

    @abstractmethod
    async def reset(self) -> Observation: ...

    @abstractmethod
    async def step(self, action: Any) -> tuple[Observation, float | None, bool, dict[str, Any]]: ...

    async def final_rewards(self) -> dict[str, float]:
        """Named rewards for the whole episode, asked for once after its last step."""
        return {}

    async def close(self) -> None:
        """Free what the episode took; called exactly once."""
        return

    @property
    def state_key(self) -> str | None:
        """Names the state the agent is in, the same wherever it is the same: what step-level credit anchors on."""
        return None

    def tool_specs(self) -> list[dict[str, Any]] | None:
        """The tools on offer this turn, in OpenAI's form; None where the agent acts by text alone."""
        return None
