"""The world of tools: an agent calls them, reads what they say, and is done when it answers in plain text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

from toolwise.envs.base import BaseEnv
from toolwise.messages import Message, ToolCall
from toolwise.tools.base import BaseTool
from toolwise.tools.schema import validate_arguments
from toolwise.types import Task
from toolwise.waiting import all_of, end_within

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """What one call came to. `failure` names the kind where it came to nothing; the model reads `text` either way."""

    text: str
    reward: float | None = None
    failure: str | None = None
    info: dict[str, Any] = field(default_factory=dict)


class ToolEnv(BaseEnv):
    """Tools live as long as the episode: created at `reset`, released at `close`, once each, whatever happened."""

    structured_actions: ClassVar[bool] = True

    def __init__(
        self,
        task: Task,
        tools: Mapping[str, BaseTool],
        *,
        offered: Sequence[str] | None = None,
        tool_timeout_s: float = 30.0,
        max_result_chars: int = 4000,
    ) -> None:
        names = offered if offered is not None else task.tools if task.tools is not None else list(tools)
        self.task = task
        self.tools = {name: tools[name] for name in names if name in tools}
        self.tool_timeout_s = tool_timeout_s
        self.max_result_chars = max_result_chars
        self._instances: dict[str, str] = {}
        self._specs = [tool.get_openai_tool_schema().model_dump() for tool in self.tools.values()]

    def tool_specs(self) -> list[dict[str, Any]]:
        return self._specs

    async def reset(self) -> str:
        for name in self.tools:
            await self._within_deadline(self._create(name))
        return ""

    async def _create(self, name: str) -> None:
        # Noted in the same breath: an episode cancelled right now must still know what to release.
        self._instances[name] = await self.tools[name].create(**self._kwargs(name, "create_kwargs"))

    async def step(self, action: Any) -> tuple[list[Message], float | None, bool, dict[str, Any]]:
        calls: list[ToolCall] = action.get("tool_calls") or []
        if not calls:
            return [], None, True, {"is_action_valid": True}
        outcomes = await all_of(self._call(call) for call in calls)
        messages = [
            Message(role="tool", tool_call_id=call.id, name=call.name or None, content=outcome.text)
            for call, outcome in zip(calls, outcomes, strict=True)
        ]
        rewards = [o.reward for o in outcomes if o.reward is not None]
        info = {
            "is_action_valid": all(o.failure is None for o in outcomes),
            "calls": dict(Counter(call.name or "unreadable" for call in calls)),
            "failed_calls": dict(Counter(o.failure for o in outcomes if o.failure)),
            "tool_info": [o.info for o in outcomes],
            "cost": sum(self.tools[call.name].price for call in calls if call.name in self.tools),
        }
        return messages, sum(rewards) if rewards else None, False, info

    async def final_rewards(self) -> dict[str, float]:
        """Asks every tool that was created, even if one of them fails; the first fault is raised after."""
        given = await all_of(
            self._within_deadline(self._end(name, "calc_reward", instance))
            for name, instance in self._instances.items()
        )
        rewards = zip(self._instances, map(as_reward, given), strict=True)
        return {name: reward for name, reward in rewards if reward is not None}

    async def close(self) -> None:
        """Release every tool that was created, even if one of them fails to go; the first fault is raised after."""
        instances, self._instances = self._instances, {}
        await all_of(
            self._within_deadline(self._end(name, "release", instance)) for name, instance in instances.items()
        )

    async def _end(self, name: str, verb: Literal["calc_reward", "release"], instance: str) -> Any:
        return await getattr(self.tools[name], verb)(instance, **self._kwargs(name, f"{verb}_kwargs"))

    async def _call(self, call: ToolCall) -> CallOutcome:
        tool = self.tools.get(call.name)
        if isinstance(call.arguments, str):
            return CallOutcome("error: the call is not a JSON object with name and arguments", failure="bad_json")
        if tool is None:
            known = ", ".join(self.tools) or "none"
            text = f"error: there is no tool {call.name!r}; tools: {known}"
            return CallOutcome(self._shorten(text), failure="unknown_tool")
        problems = validate_arguments(tool.tool_schema, call.arguments)
        if problems:
            return CallOutcome(f"error: {'; '.join(problems)}", failure="bad_arguments")
        kwargs = self._kwargs(call.name, "execute_kwargs")
        late = TimeoutError(f"took longer than {self.tool_timeout_s:g} s")
        try:
            work = tool.execute(self._instances[call.name], call.arguments, **kwargs)
            text, reward, info = await end_within(self.tool_timeout_s, work, late)
            return CallOutcome(self._shorten(text), as_reward(reward), info=info)
        except Exception as fault:  # a tool's fault is the model's to read and ours to count
            if fault is late:
                return CallOutcome(f"error: {call.name} {late}", failure="timeout")
            text = f"error: {call.name} failed: {type(fault).__name__}: {fault}"
            return CallOutcome(self._shorten(text), failure="exception")

    def _kwargs(self, name: str, which: str) -> dict[str, Any]:
        return self.task.tools_kwargs.get(name, {}).get(which) or {}

    async def _within_deadline(self, work: Coroutine[Any, Any, T]) -> T:
        return await end_within(self.tool_timeout_s, work, TimeoutError(f"took longer than {self.tool_timeout_s:g} s"))

    def _shorten(self, text: str) -> str:
        text = text.encode("utf-8", "replace").decode()  # half a character is no text, and no tokenizer takes it
        if len(text) <= self.max_result_chars:
            return text
        return f"{text[: self.max_result_chars]}… ({len(text) - self.max_result_chars} more characters)"


def as_reward(value: Any) -> float | None:
    """A step's or a tool's reward, refused where it is none: a NaN would spoil its whole group in silence."""
    reward = None if value is None else float(value)
    if reward is not None and not math.isfinite(reward):
        raise ValueError(f"the reward {reward} is no finite number")
    return reward
