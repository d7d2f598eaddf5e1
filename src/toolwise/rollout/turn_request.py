"""An episode whose every turn has its own route, chosen from the tokens that the model is about to read.

The conversation only grows: a route refuses tools that stay in the prompt, and adds text to a message that is still
unread. So the state that the router reads is also the prefix that the turn is generated from.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from toolwise.concurrency.tasks import raise_if_cancelled
from toolwise.concurrency.text_threads import run_if_long
from toolwise.errors import ToolwiseError
from toolwise.messages import Message, Prefix, text_chars
from toolwise.rollout.request import AsyncRolloutRequest
from toolwise.types import Rollout, StopReason, TurnRoute


@runtime_checkable
class RoutedSession(Protocol):
    """A policy's session that can be routed at every turn."""

    def next_prompt(self, observation: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> list[int]:
        """The tokens that the next turn would begin with."""

    def limit_turns(self, *, max_new_tokens: int | None = None, bans_calls: bool = False) -> None:
        """Limit the turns from now on."""


class TurnRoutedRequest(AsyncRolloutRequest):
    """Asks `decision.turns` for a route before each turn."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.turn_routes: list[TurnRoute] = []
        self.on_route: Callable[[TurnRoute], None] | None = None

    async def _decide(self) -> None:
        if not self.done:
            await self._route_turn()
        await super()._decide()

    async def _route_turn(self) -> None:
        try:
            specs = self.env.tool_specs()
        except BaseException as fault:
            self._record_fault(fault, StopReason.ENV_FAULT, "tool_specs: ")
            return
        try:
            if self._session is None:
                self._session = self._open_session()
            session, turns = self._session, None if self.decision is None else self.decision.turns
            if turns is None or not isinstance(session, RoutedSession):
                raise ToolwiseError("a route for every turn needs the model of this process, and a router for it")
            messages = Prefix(self.messages)
            prompt_ids = await run_if_long(text_chars(messages), session.next_prompt, messages, specs)
            chosen = await turns.route(len(self.steps), Prefix(self.messages), prompt_ids, self.rollout_offset)
            if self._finish_task is None:
                self._take(chosen, session)
        except BaseException as fault:
            self._record_fault(fault, StopReason.POLICY_FAULT, "router: ")
        raise_if_cancelled()

    def _take(self, chosen: TurnRoute, session: RoutedSession) -> None:
        self.turn_routes.append(chosen)
        self.env.forbid_tools(chosen.forbidden)
        session.limit_turns(max_new_tokens=chosen.max_new_tokens, bans_calls=chosen.bans_calls)
        if chosen.message is not None:
            self.messages[-1] = chosen.message
        if self.on_route is not None:
            self.on_route(chosen)

    def to_rollout(self) -> Rollout:
        logprobs = [route.log_prob for route in self.turn_routes if route.log_prob is not None]
        return dataclasses.replace(
            super().to_rollout(),
            turn_routes=tuple(self.turn_routes),
            router_log_prob=math.fsum(logprobs) if logprobs and len(logprobs) == len(self.turn_routes) else None,
        )
