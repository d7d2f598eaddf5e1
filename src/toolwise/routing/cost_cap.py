"""A hard cap on the cost of one question: calls beyond it are refused with an error that the model reads. Results can
say what is left of a budget."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from toolwise.envs.base import BaseEnv, Observation
from toolwise.envs.tool_env import MALFORMED_CALL, MALFORMED_CALL_MESSAGE
from toolwise.messages import Message, ToolCall
from toolwise.routing.cost import UNREADABLE
from toolwise.types.rollouts import OVER_BUDGET

BUDGET_SPENT_MESSAGE = "error: the budget for tools is spent; answer with what you know"

Note = Callable[[float], str]
Price = Callable[[Mapping[str, int]], float]
"""Total cost of calls, given as tool name -> number of calls."""


_REFUSALS = {OVER_BUDGET: BUDGET_SPENT_MESSAGE, MALFORMED_CALL: MALFORMED_CALL_MESSAGE}


def _kind(call: ToolCall) -> str:
    """Why a call beyond the cap failed."""
    return MALFORMED_CALL if isinstance(call.arguments, str) else OVER_BUDGET


class CappedEnv:
    """Wraps `inner` and refuses calls that would bring the cost above `cap`.

    Calls of one turn are checked in order, each with the accepted ones before it. A call that adds no cost, as the
    second one does if any number of calls costs the same, is always accepted, and so is one that the route rules out,
    which is free. A refused call that cannot be parsed is told so instead. All but `step` is that of `inner`; tools
    stay in the prompt after the cap is reached, because changing it would invalidate the KV cache. `note` is what the
    last result of a turn adds about the cost so far.
    """

    def __init__(self, inner: BaseEnv, cap: float, price: Price, note: Note | None = None) -> None:
        self.inner, self.cap, self.price, self.note = inner, cap, price, note
        self._calls_made: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def step(self, action: Any) -> tuple[Observation, float | None, bool, dict[str, Any]]:
        calls = list(action.get("tool_calls") or ()) if isinstance(action, Mapping) else []
        accepted = [self._admit(call) for call in calls]
        if all(accepted):
            observation, reward, done, info = await self.inner.step(action)
            return observation if done or not calls else self._noted(observation), reward, done, info
        observation = []
        reward, done, info = None, False, dict[str, Any]()
        if any(accepted):
            action = {**action, "tool_calls": list(itertools.compress(calls, accepted))}
            observation, reward, done, info = await self.inner.step(action)
        results = iter([] if isinstance(observation, str) else observation)
        messages = [
            next(results)
            if good
            else Message.unchecked("tool", _REFUSALS[_kind(call)], tool_call_id=call.id, name=call.name or None)
            for call, good in zip(calls, accepted, strict=True)
        ]
        # Refused calls count as failed only: `calls` are those that were executed and paid for.
        refused = Counter(_kind(call) for call, good in zip(calls, accepted, strict=True) if not good)
        failed = Counter(info.get("failed_calls") or {}) + refused
        info = {**info, "is_action_valid": False, "failed_calls": dict(failed)}
        return self._noted([*messages, *results]), reward, done, info

    def _noted(self, observation: Observation) -> Observation:
        """With a note at the end of the last result."""
        text = "" if self.note is None else self.note(self.price(self._calls_made))
        if not text or isinstance(observation, str) or not observation:
            return observation
        *before, last = observation
        return [*before, last.model_copy(update={"content": f"{last.content or ''}\n{text}"})]

    def _admit(self, call: ToolCall) -> bool:
        if self.inner.refuses(call.name):
            return True
        calls = self._calls_made + Counter({call.name or UNREADABLE: 1})
        if self.price(calls) > max(self.cap, self.price(self._calls_made)) + 1e-9:
            return False
        self._calls_made = calls
        return True
