"""A hard cap on the cost of one episode: calls beyond it are refused with an error that the model reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal

from toolwise.envs.base import BaseEnv, Observation
from toolwise.messages import Message, ToolCall
from toolwise.routing.usage import UNREADABLE

BUDGET_SPENT_MESSAGE = "error: the budget for tools is spent; answer with what you know"
OVER_BUDGET = "over_budget"
"""The key under which refused calls are counted in `failed_calls`."""

Price = Callable[[Mapping[str, int]], float]
"""Total cost of calls, given as tool name -> number of calls."""


class CappedEnv(BaseEnv):
    """Wraps `inner` and refuses calls that would bring the cost above `cap`.

    Calls of one turn are checked in order, each with the accepted ones before it. A call that adds no cost, as the
    second one does if any number of calls costs the same, is always accepted.
    """

    def __init__(self, inner: BaseEnv, cap: float, price: Price) -> None:
        self.inner, self.cap, self.price = inner, cap, price
        self.structured_actions = inner.structured_actions  # type: ignore[misc]  # a class attribute elsewhere
        self.keeps_deadlines = inner.keeps_deadlines  # type: ignore[misc]
        self.refused = 0
        self._calls_made: Counter[str] = Counter()

    async def step(self, action: Any) -> tuple[Observation, float | None, bool, dict[str, Any]]:
        calls = list(action.get("tool_calls") or ()) if isinstance(action, Mapping) else []
        accepted = [self._admit(call) for call in calls]
        if all(accepted):
            return await self.inner.step(action)
        self.refused += accepted.count(False)
        observation: Observation = []
        reward, done, info = None, False, dict[str, Any]()
        if any(accepted):
            accepted_calls = [call for call, good in zip(calls, accepted, strict=True) if good]
            observation, reward, done, info = await self.inner.step({**action, "tool_calls": accepted_calls})
        return _merge_results(calls, accepted, observation), reward, done, _with_refusals(info, accepted.count(False))

    def _admit(self, call: ToolCall) -> bool:
        calls = self._calls_made + Counter({call.name or UNREADABLE: 1})
        if self.price(calls) > max(self.cap, self.price(self._calls_made)) + 1e-9:
            return False
        self._calls_made = calls
        return True

    def set_seed(self, seed: int) -> None:
        self.inner.set_seed(seed)

    async def reset(self) -> Observation:
        return await self.inner.reset()

    async def final_rewards(self) -> dict[str, float]:
        return await self.inner.final_rewards()

    async def close(self) -> None:
        await self.inner.close()

    @property
    def state_key(self) -> str | None:
        return self.inner.state_key

    def tool_specs(self) -> list[dict[str, Any]] | None:
        # Kept in the prompt after the cap is reached: changing it would invalidate the KV cache.
        return self.inner.tool_specs()

    def unread_calls(self, action: Any) -> dict[str, Any]:
        return self.inner.unread_calls(action)

    def phase_of(self, action: Any) -> Literal["tool", "interaction"]:
        return self.inner.phase_of(action)


def _merge_results(calls: list[ToolCall], accepted: list[bool], observation: Observation) -> list[Message]:
    """One result per call, in the order of the calls."""
    results = iter([] if isinstance(observation, str) else observation)
    messages = [
        next(results)
        if good
        else Message.unchecked("tool", BUDGET_SPENT_MESSAGE, tool_call_id=call.id, name=call.name or None)
        for call, good in zip(calls, accepted, strict=True)
    ]
    return [*messages, *results]


def _with_refusals(info: dict[str, Any], count: int) -> dict[str, Any]:
    """Refused calls count as failed only: `calls` are those that were executed and paid for."""
    failed = Counter(info.get("failed_calls") or {}) + Counter({OVER_BUDGET: count})
    return {**info, "is_action_valid": False, "failed_calls": dict(failed)}
