"""A plain class as an environment: its public methods are the tools, with one object per episode."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

from toolwise.concurrency.deadlines import gather_all
from toolwise.concurrency.limits import Gate
from toolwise.envs.blocking_calls import BlockingCalls
from toolwise.envs.state_keys import public_state, state_digest
from toolwise.envs.tool_env import CallOutcome, ToolEnv, validate_reward
from toolwise.errors import ConfigError
from toolwise.messages import Message, ToolCall
from toolwise.tools.base import ToolResult
from toolwise.tools.function import FunctionTool
from toolwise.types import Task
from toolwise.untrusted import user_code

RESERVED_NAMES = frozenset({"reset", "reward", "done", "close", "state_key", "gold_actions"})
"""Methods with a special meaning, which are never tools."""
_UNBOUND = object()


class MethodTool(FunctionTool[..., Any]):
    """One public method: the schema is built once per class, the method is bound to a new object per episode."""

    def __init__(self, name: str, method: FunctionType | staticmethod[..., Any]) -> None:
        self._method = method
        # Bound to a placeholder, so that `self` is not an argument.
        super().__init__(method.__get__(_UNBOUND, object), name=name, isolate=False)

    def bind(self, target: object, calls: BlockingCalls) -> MethodTool:
        bound = copy.copy(self)
        bound.function = self._method.__get__(target, type(target))
        bound._calls = calls
        return bound

    _calls: BlockingCalls

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
        work = self._bind(parameters, {**self._create_kwargs.get(instance_id, {}), **kwargs})
        if not inspect.iscoroutinefunction(self.function):
            # Convert the result in the same thread: it may be large, or run user code.
            return await self._calls.call(lambda: self._result(work()))
        return self._result(await work())

    def _text(self, value: Any) -> str:
        if isinstance(value, Iterator) or inspect.isasyncgen(value) or inspect.isawaitable(value):
            raise TypeError(f"{self.name} returned a {type(value).__name__}: return a list or a string")
        return super()._text(value)


class MethodsEnv(ToolEnv):
    """An episode with one object per class in `kinds`; `make(kind)` creates it, by default `kind(**kwargs)`.

    Tools are the public methods that the class or its bases define, with all parameters annotated; nothing else can be
    called. Calls of one turn run one after another, because they share the object. A class may also have `reset()` or
    `reset(seed=…)`, which returns the first observation; `done` and `reward`, methods or attributes: whether the
    episode is done, and a reward for the whole episode; `state_key`; `close()`; `gold_actions()`.
    """

    def __init__(
        self,
        kinds: type | Sequence[type],
        *,
        kwargs: Mapping[str, Any] | None = None,
        make: Callable[[type], object] | None = None,
        methods: Sequence[str] | None = None,
        exclude: Collection[str] = (),
        task: Task | None = None,
        state_of: Callable[[Sequence[object]], str] | None = None,
        tool_timeout_s: float = 30.0,
        max_result_chars: int = 4000,
        gates: Mapping[str, Gate] | None = None,
    ) -> None:
        self.kinds = [kinds] if isinstance(kinds, type) else list(kinds)
        self._make = make if make is not None else lambda kind: kind(**(kwargs or {}))
        self._owners, tools = choose_methods(self.kinds, methods, exclude)
        self._state_of = state_of
        self._seed: int | None = None
        self._objects: list[object] = []
        self._calls = BlockingCalls(" and ".join(kind.__name__ for kind in self.kinds))
        super().__init__(
            task if task is not None else Task(task_id="methods", prompt=[]),
            tools,
            tool_timeout_s=tool_timeout_s,
            max_result_chars=max_result_chars,
            gates=gates,
        )

    def set_seed(self, seed: int) -> None:
        self._seed = seed

    async def reset(self) -> str:
        self._objects = []
        await self._with_timeout(self._calls.call(self._make_all))
        for name, tool in self.tools.items():
            assert isinstance(tool, MethodTool)
            self.tools[name] = self._episode_tools[name] = tool.bind(self._objects[self._owners[name]], self._calls)
        await super().reset()
        observations = [await self._hook_value(target, "reset") for target in self._objects]
        return "\n".join(str(text) for text in observations if text is not None)

    async def step(self, action: Any) -> tuple[list[Message], float | None, bool, dict[str, Any]]:
        messages, reward, done, info = await super().step(action)
        # While a call hangs, the object cannot be queried; the next tool results tell the model.
        if not done and not self._calls.has_hung_call:
            done = any([bool(await self._hook_value(target, "done")) for target in self._objects])
        return messages, reward, done, info

    async def final_rewards(self) -> dict[str, float]:
        rewards = await super().final_rewards()
        for kind, target in zip(self.kinds, self._objects, strict=False):
            if (reward := validate_reward(await self._hook_value(target, "reward"))) is not None:
                rewards[kind.__name__] = reward
        return rewards

    async def close(self) -> None:
        closers = [] if self._closed else _closers(self._objects)
        closing = [close() for close in closers if inspect.iscoroutinefunction(close)]
        await gather_all([super().close(), *map(self._with_timeout, [*closing, self._calls.end(self._close_blocking)])])

    def _close_blocking(self) -> None:
        """Closes each object, even if one fails; the first exception is raised afterwards. Collects objects only now: a
        constructor that timed out may have created one since."""
        faults: list[Exception] = []
        for close in _closers(self._objects):
            try:
                if not inspect.iscoroutinefunction(close):
                    user_code.call_user_code(close)
            except Exception as fault:
                faults.append(fault)
        if faults:
            raise faults[0]

    @property
    def state_key(self) -> str | None:
        if not self._objects or self._calls.has_hung_call:
            return None
        if self._state_of is not None:
            return self._state_of(self._objects)
        return "+".join(_state_key(target) for target in self._objects)

    def gold_actions(self) -> Sequence[Any] | None:
        hooks = (_hook(target, "gold_actions") for target in self._objects)
        return next((hook() for hook in hooks if hook is not None), None)

    def _make_all(self) -> None:
        for kind in self.kinds:  # appended one by one: if one fails, those before it are still closed
            self._objects.append(self._make(kind))

    async def _call_all(self, calls: Sequence[ToolCall]) -> list[CallOutcome]:
        return [await self._call(call) for call in calls]

    async def _hook_value(self, target: object, name: str) -> Any:
        """The value of an optional hook such as `done` or `reward`: an attribute, or the result of a method."""
        if not _has_hook(target, name):
            return None
        return await self._with_timeout(self._call_hook(target, name))

    async def _call_hook(self, target: object, name: str) -> Any:
        hook = await self._calls.call(lambda: getattr(target, name))
        if not callable(hook):
            return hook
        seeded = name == "reset" and self._seed is not None and "seed" in inspect.signature(hook).parameters
        work = partial(hook, seed=self._seed) if seeded else hook
        return await work() if inspect.iscoroutinefunction(hook) else await self._calls.call(work)


def choose_methods(
    kinds: Sequence[type], methods: Sequence[str] | None, exclude: Collection[str]
) -> tuple[dict[str, int], dict[str, MethodTool]]:
    """Select the methods to offer; returns, by tool name, the index of the class and the tool."""
    owners: dict[str, int] = {}
    tools: dict[str, MethodTool] = {}
    for index, kind in enumerate(kinds):
        for name, tool in method_tools(kind).items():
            if name in exclude or (methods is not None and name not in methods):
                continue
            if name in tools:
                other = kinds[owners[name]].__name__
                raise ConfigError(f"env: {other} and {kind.__name__} both have {name}(); exclude it, or rename one")
            owners[name], tools[name] = index, tool
    names = ", ".join(kind.__name__ for kind in kinds)
    known = [name for kind in kinds for name in method_tools(kind)]
    if missing := [name for name in methods or () if name not in known]:
        raise ConfigError(
            f"env: {names} has no public method {', '.join(missing)}; it has {', '.join(known) or 'none'}"
        )
    if not tools:
        raise ConfigError(f"env: {names} has no public methods to call; add some, or check `methods` and `exclude`")
    return owners, tools


@lru_cache(maxsize=256)
def method_tools(kind: type) -> Mapping[str, MethodTool]:
    """A tool per public method that `kind` or one of its bases (other than `object`) defines, in order."""
    tools: dict[str, MethodTool] = {}
    for base in reversed(kind.__mro__[:-1]):
        for name in vars(base):
            if name.startswith("_") or name in RESERVED_NAMES:
                continue
            # Static lookup: properties do not run, and an override that is not a method hides the method.
            member = inspect.getattr_static(kind, name)
            if isinstance(member, FunctionType | staticmethod) and name not in tools:
                tools[name] = MethodTool(name, member)
    return tools


def _has_hook(target: object, name: str) -> bool:
    """Whether a plain object has an optional hook, on its class or as an attribute of its own."""
    return getattr(type(target), name, None) is not None or name in getattr(target, "__dict__", ())


def _hook(target: object, name: str) -> Any:
    return getattr(target, name) if _has_hook(target, name) else None


def _state_key(target: object) -> str:
    for name in ("state_key", "__state__"):
        if hasattr(type(target), name):
            value = getattr(target, name)
            return str(value() if callable(value) else value)
    return state_digest(public_state(target))


def _closers(objects: Sequence[object]) -> list[Callable[[], Any]]:
    return [close for target in objects if callable(close := _hook(target, "close"))]
