"""A route for each turn of an episode: what a router chooses before the model speaks, and who chooses it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from toolwise.messages import Message


@dataclass(frozen=True, slots=True)
class TurnRoute:
    """The route of one turn, and what it changes: nothing that the model has already read."""

    turn: int
    """Index of the assistant message."""
    route: str
    log_prob: float | None = None
    """The router's log-probability of `route`; None if it was given."""
    logits: tuple[float | None, ...] | None = None
    """As in `RouteDecision.logits`."""
    forbidden: tuple[str, ...] = ()
    """Tools that are refused in this turn; they stay in the prompt."""
    message: Message | None = None
    """The last message with text appended to it, before the model reads it for the first time."""
    bans_calls: bool = False
    """Whether the model cannot even begin a call."""
    max_new_tokens: int | None = None
    prediction: Any = field(default=None, repr=False, compare=False)
    """The head's prediction with its inputs, for the update."""


class TurnRouting(Protocol):
    """Routes the turns of the rollouts of one task."""

    async def route(
        self, turn: int, messages: Sequence[Message], prompt_ids: Sequence[int], rollout_offset: int
    ) -> TurnRoute:
        """The route of a turn. `prompt_ids` are the tokens that the model would read now."""
