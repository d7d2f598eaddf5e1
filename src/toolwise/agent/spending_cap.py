"""A hard cap on what one episode may spend: calls beyond it are refused, with an error that the model reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal

from toolwise.envs.base import BaseEnv, Observation
from toolwise.messages import Message, ToolCall
from toolwise.routing.usage import UNREADABLE

BUDGET_SPENT_MESSAGE = "error: the budget for tools is spent; answer with what you know"
OVER_BUDGET = "over_budget"
"""The kind of failure that a refused call is counted as."""

Price = Callable[[Mapping[str, int]], float]
"""What calls cost altogether: tool name -> how often."""


class CappedEnv(BaseEnv):
    """The world `inner`, in which nothing more is served once it would cost more than `cap`.

    Calls of one turn are looked at in their order, each as if those before it were made. A call that costs nothing
    more, as a second one does where any number costs the same, is served to the end.
    """

    def __init__(self, inner: BaseEnv, cap: float, price: Price) -> None:
        self.inner, self.cap, self.price = inner, cap, price
        self.structured_actions = inner.structured_actions  # type: ignore[misc]  # of this world, as of the inner one
        self.keeps_deadlines = inner.keeps_deadlines  # type: ignore[misc]
        self.refused = 0
        self._calls_made: Counter[str] = Counter()

    async def step(self, action: Any) -> tuple[Observation, float | None, bool, dict[str, Any]]:
        calls = list(action.get("tool_calls") or ()) if isinstance(action, Mapping) else []
        served = [self._admit(call) for call in calls]
        if all(served):
            return await self.inner.step(action)
        self.refused += served.count(False)
        observation: Observation = []
        reward, done, info = None, False, dict[str, Any]()
        if any(served):
            passed = [call for call, good in zip(calls, served, strict=True) if good]
            observation, reward, done, info = await self.inner.step({**action, "tool_calls": passed})
        return _merge_results(calls, served, observation), reward, done, _with_refusals(info, served.count(False))

    def _admit(self, call: ToolCall) -> bool:
        with_it = self._calls_made + Counter({call.name or UNREADABLE: 1})
        if self.price(with_it) > max(self.cap, self.price(self._calls_made)) + 1e-9:
            return False
        self._calls_made = with_it
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
        # Not withdrawn from the prompt once the cap is reached: what the model has read would have to be read again.
        return self.inner.tool_specs()

    def unread_calls(self, action: Any) -> dict[str, Any]:
        return self.inner.unread_calls(action)

    def phase_of(self, action: Any) -> Literal["tool", "interaction"]:
        return self.inner.phase_of(action)


def _merge_results(calls: list[ToolCall], served: list[bool], observation: Observation) -> list[Message]:
    """Every call with its result, in the order of the calls."""
    results = iter([] if isinstance(observation, str) else observation)
    told = [
        next(results)
        if good
        else Message.unchecked("tool", BUDGET_SPENT_MESSAGE, tool_call_id=call.id, name=call.name or None)
        for call, good in zip(calls, served, strict=True)
    ]
    return [*told, *results]


def _with_refusals(info: dict[str, Any], count: int) -> dict[str, Any]:
    """Not among the calls, which are what was made and is paid for."""
    failed = Counter(info.get("failed_calls") or {}) + Counter({OVER_BUDGET: count})
    return {**info, "is_action_valid": False, "failed_calls": dict(failed)}
