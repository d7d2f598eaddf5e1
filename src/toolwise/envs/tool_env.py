"""The tool environment: the agent calls tools, reads their results, and is done when it answers in plain text."""

from __future__ import annotations

import asyncio
import math
import weakref
from collections import Counter
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar
from uuid import uuid4

from toolwise.concurrency.deadlines import WorkClock, gather_all, run_with_deadline
from toolwise.concurrency.limits import UNLIMITED, Gate
from toolwise.envs.base import BaseEnv
from toolwise.messages import Message, ToolCall
from toolwise.tools.base import BaseTool, OpenAIFunctionToolSchema
from toolwise.tools.call_errors import ToolCallError
from toolwise.tools.function import FunctionTool
from toolwise.tools.schema import validate_arguments
from toolwise.types import Task
from toolwise.untrusted import user_code
from toolwise.untrusted.bounds import MAX_SCORE, in_bounds

T = TypeVar("T")

MALFORMED_CALL_MESSAGE = "error: the call is not a JSON object with name and arguments"
MALFORMED_CALL = "bad_json"
"""The key under which calls that cannot be parsed are counted in `failed_calls`."""


@dataclass(slots=True)  # not frozen: created every turn, and freezing triples the cost
class CallOutcome:
    """The outcome of one call. `failure` is the kind of failure, if any; the model reads `text` either way."""

    text: str
    reward: float | None = None
    failure: str | None = None
    info: dict[str, Any] = field(default_factory=dict)
    infrastructure: bool = False
    """Something behind the tool failed: neither the tool's nor the model's error."""
    queue_s: float = 0.0
    """Time spent waiting for a worker or a free slot, which does not count towards the tool's timeout."""
    work_s: float | None = None
    """Measured time of the call without that; None if it reached no tool."""


class ToolEnv(BaseEnv):
    """Tools live as long as the episode: created in `reset`, released in `close`, exactly once, whatever happens."""

    structured_actions: ClassVar[bool] = True
    keeps_deadlines: ClassVar[bool] = True

    def __init__(
        self,
        task: Task,
        tools: Mapping[str, BaseTool],
        *,
        offered: Sequence[str] | None = None,
        unseen: Mapping[str, BaseTool] | None = None,
        forbidden: Collection[str] = (),
        tool_timeout_s: float = 30.0,
        max_result_chars: int = 4000,
        gates: Mapping[str, Gate] | None = None,
    ) -> None:
        names = offered if offered is not None else task.tools if task.tools is not None else list(tools)
        self.task = task
        self.tools = {name: tools[name] for name in names if name in tools}
        # Tools that the route removed: calls to them are refused without counting as the model's mistake.
        task_tools = task.tools if task.tools is not None else tools
        self._removed_tools = frozenset(task_tools).difference(self.tools)
        # Cost of a malformed call: never less than that of a well-formed one.
        self._malformed_price = max((tool.price for tool in tools.values()), default=BaseTool.price)
        # Includes tools that live with the episode but that the agent can neither see nor call.
        self._episode_tools = {**self.tools, **(unseen or {})}
        # Tools that the agent can see but not call: the route leaves the prompt unchanged.
        self._forbidden = frozenset(forbidden)
        self._where = "for this request"
        self.tool_timeout_s = tool_timeout_s
        self._timeout_text = f"took longer than {tool_timeout_s:g} s"
        self.max_result_chars = max_result_chars
        self.gates = gates if gates is not None else {}
        self._instances: dict[str, str] = {}
        self._closed = False
        self._episode = uuid4().hex  # shared by all tools of the episode, so that they can share state

    def tool_specs(self) -> list[dict[str, Any]]:
        return [tool_spec(tool, self.task) for tool in self.tools.values()]

    def forbid_tools(self, names: Collection[str]) -> None:
        self._forbidden, self._where = frozenset(names), "in this turn"

    def refuses(self, name: str) -> bool:
        return name in self._forbidden or name in self._removed_tools

    async def reset(self) -> str:
        for name in self._episode_tools:
            await self._with_timeout(self._create(name))
        return ""

    async def _create(self, name: str) -> None:
        # Recorded right after the await: an episode cancelled at this point must still release the instance.
        instance = await self._episode_tools[name].create(self._episode, **self._kwargs(name, "create_kwargs"))
        if self._closed:  # creation timed out earlier, and the episode has ended
            await self._with_timeout(self._end(name, "release", instance))
        else:
            self._instances[name] = instance

    async def step(self, action: Any) -> tuple[list[Message], float | None, bool, dict[str, Any]]:
        calls: list[ToolCall] = action.get("tool_calls") or []
        if not calls:
            return [], None, True, {"is_action_valid": True}
        outcomes = [await self._call(calls[0])] if len(calls) == 1 else await self._call_all(calls)
        messages = [
            Message.unchecked("tool", outcome.text, tool_call_id=call.id, name=call.name or None)
            for call, outcome in zip(calls, outcomes, strict=True)
        ]
        rewards = [o.reward for o in outcomes if o.reward is not None]
        info = {
            "is_action_valid": all(o.failure is None for o in outcomes),
            "calls": count_names(call.name or "unreadable" for call in calls),
            "failed_calls": count_names(o.failure for o in outcomes if o.failure),
            "tool_info": [o.info for o in outcomes],
            "cost": sum(map(self._price, calls)),
        }
        if any(o.queue_s for o in outcomes):
            info["queue_s"] = [o.queue_s for o in outcomes]
        if timed := [(c.name, o.work_s) for c, o in zip(calls, outcomes, strict=True) if o.work_s is not None]:
            info["call_s"] = timed
        if outages := [o.text for o in outcomes if o.infrastructure]:
            info["infrastructure_fault"] = outages[0]
        return messages, sum(rewards) if rewards else None, False, info

    def unread_calls(self, action: Any) -> dict[str, Any]:
        unparsed = [call for call in action.get("tool_calls") or () if isinstance(call.arguments, str)]
        return {
            "calls": count_names(call.name or "unreadable" for call in unparsed),
            "failed_calls": count_names("bad_json" for _ in unparsed),
            "cost": sum(map(self._price, unparsed)),
        }

    async def final_rewards(self) -> dict[str, float]:
        """Ask every created tool for its reward, even if one fails; the first exception is raised afterwards."""
        instances = {
            name: instance
            for name, instance in self._instances.items()
            if type(self._episode_tools[name]).calc_reward is not BaseTool.calc_reward
        }
        values = await gather_all(
            self._with_timeout(self._end(name, "calc_reward", instance)) for name, instance in instances.items()
        )
        rewards = zip(instances, map(validate_reward, values), strict=True)
        return {name: reward for name, reward in rewards if reward is not None}

    async def close(self) -> None:
        """Release every created tool, even if one fails; the first exception is raised afterwards."""
        self._closed = True
        instances, self._instances = self._instances, {}
        await gather_all(
            self._with_timeout(self._end(name, "release", instance)) for name, instance in instances.items()
        )

    async def _end(self, name: str, verb: Literal["calc_reward", "release"], instance: str) -> Any:
        return await getattr(self._episode_tools[name], verb)(instance, **self._kwargs(name, f"{verb}_kwargs"))

    async def _call_all(self, calls: Sequence[ToolCall]) -> list[CallOutcome]:
        """Run the calls of one turn concurrently."""
        return await gather_all(self._call(call) for call in calls)

    async def _call(self, call: ToolCall) -> CallOutcome:
        tool = self.tools.get(call.name) if self._may_call(call.name) else None
        if isinstance(call.arguments, str):
            return CallOutcome(MALFORMED_CALL_MESSAGE, failure=MALFORMED_CALL)
        if tool is None:
            tools = f"tools: {', '.join(filter(self._may_call, self.tools)) or 'none'}"
            if call.name in self.tools:
                return self._failure(f"{call.name} is not to be used {self._where}; {tools}", "forbidden_tool")
            return self._failure(f"there is no tool {call.name!r}; {tools}", "unknown_tool")
        if problems := validate_arguments(schema_for(tool, self.task), call.arguments):
            return self._failure("; ".join(problems), "bad_arguments")
        clock, loop = WorkClock(), asyncio.get_running_loop()
        began = loop.time()
        outcome = await self._execute(tool, call.arguments, clock)
        outcome.queue_s = clock.queue_s
        outcome.work_s = max(0.0, loop.time() - began - clock.queue_s)
        return outcome

    async def _execute(self, tool: BaseTool, arguments: dict[str, Any], clock: WorkClock) -> CallOutcome:
        kwargs = self._kwargs(tool.name, "execute_kwargs")
        late, gate = TimeoutError(self._timeout_text), self.gates.get(tool.name, UNLIMITED)
        try:
            if gate.limit is not None:
                queued_at = asyncio.get_running_loop().time()
                await gate.enter()
                clock.queue_s += asyncio.get_running_loop().time() - queued_at
            try:
                work = user_code.call_user_code(tool.execute, self._instances[tool.name], arguments, **kwargs)
                text, reward, info = await run_with_deadline(self.tool_timeout_s, work, late, clock)
            finally:
                gate.leave()
            failure = "tool_error" if info.get("ok") is False else None
            return CallOutcome(self._shorten(text), validate_reward(reward), failure, info)
        except ToolCallError as fault:
            return self._failure(str(fault), fault.failure, infrastructure=fault.infrastructure)
        except Exception as fault:  # the model reads a tool's error, and the metrics count it
            if fault is late:
                return CallOutcome(f"error: {tool.name} {late}", failure="timeout")
            return self._failure(f"{tool.name} failed: {user_code.describe(fault)}", "exception")

    def _failure(self, problem: str, kind: str, *, infrastructure: bool = False) -> CallOutcome:
        return CallOutcome(self._shorten(f"error: {problem}"), failure=kind, infrastructure=infrastructure)

    def _price(self, call: ToolCall) -> float:
        """A call costs its tool's price, executed or not. A call to an unknown tool costs as much as the most expensive
        tool, so that garbling a call saves nothing. A call that the route refuses is free."""
        if self._may_call(call.name):
            return self.tools[call.name].price
        return 0.0 if self.refuses(call.name) else self._malformed_price

    def _may_call(self, name: str) -> bool:
        return name in self.tools and name not in self._forbidden

    def _kwargs(self, name: str, which: str) -> dict[str, Any]:
        return self.task.tools_kwargs.get(name, {}).get(which) or {}

    async def _with_timeout(self, work: Coroutine[Any, Any, T]) -> T:
        return await run_with_deadline(self.tool_timeout_s, work, TimeoutError(self._timeout_text), WorkClock())

    def _shorten(self, text: str) -> str:
        excess = len(text) - self.max_result_chars
        text = text[: self.max_result_chars]  # before encoding: the text may be gigabytes
        text = text.encode("utf-8", "replace").decode()  # tokenizers reject lone surrogates
        return text if excess <= 0 else f"{text}… ({excess} more characters)"


_specs: dict[int, tuple[weakref.ref[OpenAIFunctionToolSchema], dict[str, Any]]] = {}


def schema_for(tool: BaseTool, task: Task | None) -> OpenAIFunctionToolSchema:
    """The schema shown to the model; for a function tool, without the arguments that the task supplies."""
    kwargs = task.tools_kwargs.get(tool.name) if task is not None else None
    if kwargs and isinstance(tool, FunctionTool):
        return tool.schema_without({**(kwargs.get("create_kwargs") or {}), **(kwargs.get("execute_kwargs") or {})})
    return tool.get_openai_tool_schema()


def tool_spec(tool: BaseTool, task: Task | None = None) -> dict[str, Any]:
    """A tool in OpenAI's format, as shown to the model; one dictionary for all rollouts with the same schema."""
    schema = schema_for(tool, task)
    key = id(schema)
    cached = _specs.get(key)
    if cached is None or cached[0]() is not schema:
        cached = _specs[key] = (weakref.ref(schema, lambda _: _specs.pop(key, None)), schema.model_dump())
    return cached[1]


def count_names(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(names))


def add_counts(counts: dict[str, int], more: Mapping[str, int]) -> None:
    """Like `Counter.update`, but faster for the zero or one names of a typical turn."""
    for name, count in more.items():
        counts[name] = counts.get(name, 0) + count


def validate_reward(value: Any) -> float | None:
    """Convert the reward of a step or a tool; a NaN is refused because it would silently spoil its whole group."""
    reward = None if value is None else float(value)
    if reward is not None and not in_bounds(reward):
        what = f"does not lie between ±{MAX_SCORE:g}" if math.isfinite(reward) else "is no finite number"
        raise ValueError(f"the reward {reward} {what}")
    return reward
