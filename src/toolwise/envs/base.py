"""The base class of environments. An environment is used for one episode and then closed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Literal

from toolwise.messages import Message

Observation = str | Sequence[Message]
Phase = Literal["tool", "interaction"]
MEASURED_TIMES = ("queue_s", "call_s")
"""Keys of a step's `info` that describe the machine and not the step."""


class BaseEnv(ABC):
    """The environment of one episode.

    `reset` returns what the agent sees first, besides the task's prompt ("" for nothing). `step` returns (observation,
    reward, done, info); `info["truncated"]` marks an episode that was cut short. A string observation becomes a user
    message.
    """

    structured_actions: ClassVar[bool] = False
    """False: `step` receives the agent's text. True: it receives the full action dictionary."""
    keeps_deadlines: ClassVar[bool] = False
    """True: `final_rewards` and `close` enforce their own timeouts, so the caller need not."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A subclass that overrides either method must state again that it keeps deadlines.
        if "keeps_deadlines" not in vars(cls) and {"final_rewards", "close"} & set(vars(cls)):
            cls.keeps_deadlines = False

    def set_seed(self, seed: int) -> None:
        """Called once before `reset`, with the same seed for all rollouts of a task; deterministic environments can
        ignore it."""
        return

    @abstractmethod
    async def reset(self) -> Observation: ...

    @abstractmethod
    async def step(self, action: Any) -> tuple[Observation, float | None, bool, dict[str, Any]]: ...

    async def final_rewards(self) -> dict[str, float]:
        """Named rewards for the whole episode; called once, after the last step."""
        return {}

    async def close(self) -> None:
        """Release the episode's resources; called exactly once."""
        return

    @property
    def state_key(self) -> str | None:
        """Key of the current state, equal for equal states; step-level advantages compare steps with equal keys."""
        return None

    def tool_specs(self) -> list[dict[str, Any]] | None:
        """The tools available this turn, in OpenAI's format; None if the agent acts by text only."""
        return None

    def unread_calls(self, action: Any) -> dict[str, Any]:
        """`calls`, `failed_calls` and `cost`, as in the info of `step`, of the unparsable calls in `action`: for an
        action that ends the episode before `step` sees it."""
        return {}

    def forbid_tools(self, names: Collection[str]) -> None:
        """Refuse calls of these tools from now on, and allow all others; the list of tools stays. Called before a turn
        that has its own route. An environment without tools has nothing to refuse."""
        return

    def refuses(self, name: str) -> bool:
        """Whether the route rules out calls of this tool, which are then answered with an error and cost nothing."""
        return False

    def phase_of(self, action: Any) -> Phase:
        """What `step` will do with `action`: run tools or the environment, or let a simulated user reply."""
        return "tool"

    def gold_actions(self) -> Sequence[Any] | None:
        """Actions that reach the goal from the start of this episode, if the environment has them. Called after
        `reset` by checkers and tests; never shown to an agent."""
        return None

    def example_actions(self) -> Sequence[Any]:
        """A few actions that are valid after `reset`, for checkers that cannot derive any."""
        return ()
