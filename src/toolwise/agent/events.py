"""What happens while an agent answers, in order: the events of `Agent.stream`, whose last one is the `AgentAnswer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from toolwise.messages import Message
from toolwise.types import Rollout


@dataclass(frozen=True, slots=True)
class RouteChosen:
    route: str
    route_probs: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next piece of what the model writes, including the text of its calls."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCalled:
    name: str
    arguments: Any


@dataclass(frozen=True, slots=True)
class ToolReturned:
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class AgentAnswer:
    text: str
    """The agent's last message."""
    route: str
    """Empty without a router; "SEARCH-FAMILY > ANSWER" if each turn has its own."""
    route_probs: Mapping[str, float]
    """route -> probability, at the first turn; empty without a router, or if the question is too long for it"""
    cost: float
    """Cost of the calls that were executed, in the unit of the budget; without a router the tools' prices."""
    calls: Mapping[str, int]
    refused: int
    """Calls refused because of the cap, or because the route does not offer their tool."""
    seconds: float
    """Wall time, including routing."""
    rollout: Rollout
    with_tools_s: float | None = None
    """For a direct answer: the calibrated mean time of such questions with all tools, if it was measured."""

    @property
    def saved_s(self) -> float | None:
        return None if self.with_tools_s is None else self.with_tools_s - self.seconds

    @property
    def problem(self) -> str:
        """Why there is no answer, such as a question that does not fit the context; empty if the agent answered."""
        rollout = self.rollout
        return (rollout.fault or rollout.stop_reason.value.replace("_", " ")) if rollout.unanswered else ""

    @property
    def messages(self) -> list[Message]:
        """What the agent and its tools said: append them to the conversation, then the next question."""
        steps = self.rollout.steps
        return list(self.rollout.messages[len(steps[0].observation_data) :]) if steps else []


AgentEvent = RouteChosen | TextDelta | ToolCalled | ToolReturned | AgentAnswer
Emit = Callable[[AgentEvent], None]


class MessageEvents:
    """Emits the calls and results among the messages that were added since the last time."""

    def __init__(self, emit: Emit, seen: int) -> None:
        self.emit, self.seen = emit, seen

    def __call__(self, request: Any) -> None:
        messages = list(request.messages[self.seen :])
        self.seen += len(messages)
        for message in messages:
            for call in message.tool_calls or ():
                self.emit(ToolCalled(call.name, call.arguments))
            if message.role == "tool":
                self.emit(ToolReturned(message.name or "", message.content or ""))
