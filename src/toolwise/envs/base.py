"""What an agent acts in. An environment is used for one episode and then closed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from toolwise.messages import Message

Observation = str | Sequence[Message]
Phase = Literal["tool", "interaction"]


class BaseEnv(ABC):
    """One episode's world.

    `reset` gives what the agent first sees beyond the task's prompt ("" for nothing). `step` gives (observation,
    reward, done, info); an episode cut short says so with `info["truncated"]`. A plain string becomes a user message.
    """

    structured_actions: ClassVar[bool] = False
    """False: `step` gets the text the agent wrote. True: it gets the whole action dictionary."""
    keeps_deadlines: ClassVar[bool] = False
    """True: `final_rewards` and `close` end by themselves in time, so that nobody need watch them."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        # A promise about two methods is not inherited by whoever writes one of them anew.
        if "keeps_deadlines" not in vars(cls) and {"final_rewards", "close"} & set(vars(cls)):
            cls.keeps_deadlines = False

    def set_seed(self, seed: int) -> None:
        """Called once before `reset`, with the same seed for all rollouts of a task; a world without chance need
        not heed it."""
        return

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

    def unread_calls(self, action: Any) -> dict[str, Any]:
        """`calls`, `failed_calls` and `cost`, as in the info of `step`, of the calls in `action` that nobody can read:
        for an action that ends the episode before `step` sees it."""
        return {}

    def phase_of(self, action: Any) -> Phase:
        """What `step` is about to do with `action`: work with tools or the world, or let a simulated user speak."""
        return "tool"

    def gold_actions(self) -> Sequence[Any] | None:
        """Actions that reach the goal from the start of this episode, where the world knows them. Asked for after
        `reset`, by checkers and tests; never shown to an agent."""
        return None

    def example_actions(self) -> Sequence[Any]:
        """A few actions that are valid after `reset`: what a checker tries where it cannot tell by itself."""
        return ()
