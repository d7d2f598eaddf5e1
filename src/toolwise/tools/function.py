"""Typed Python functions as tools: the JSON schema is built from the signature and the docstring."""

from __future__ import annotations

import functools
import inspect
import json
import logging
import re
import sys
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Annotated, Any, Generic, ParamSpec, TypeVar, cast, overload

from pydantic import Field, FiniteFloat, PositiveInt, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, to_jsonable_python

from toolwise.concurrency.deadlines import call_in_thread, in_virtual_time
from toolwise.config.imports import Registration, did_you_mean, in_worker, registered_reference, registration_of
from toolwise.errors import ConfigError, ToolwiseError
from toolwise.notebook import lacks_file
from toolwise.tools import isolation
from toolwise.tools.base import BaseTool, OpenAIFunctionToolSchema, ToolResult
from toolwise.tools.isolation.code_location import ObjectRef
from toolwise.tools.isolation.tool_worker import LoadFault
from toolwise.tools.schema import build_tool_schema, make_adapter, read_annotations, returns_reward

log = logging.getLogger("toolwise.tools")
P = ParamSpec("P")
R = TypeVar("R")

FAMILIES = ("SEARCH", "CALCULATE", "OTHER")
"""The families that a router knows by itself; routes of a user's own may have others."""
FamilyName = Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
PositiveNumber = Annotated[FiniteFloat, Field(gt=0)]
NonNegativeNumber = Annotated[FiniteFloat, Field(ge=0)]

_TUPLE_KEY = "unannotated_tuple"  # in the info of a result, marks it on its way from a worker process
_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class FunctionTool(BaseTool, Generic[P, R]):
    """A function as a tool; calling the object calls the function.

    The model reads the return value: a string unchanged, anything else as JSON. A function annotated `-> tuple` (or
    `tuple[str, …]` with two or three members) returns (text, reward) or (text, reward, info). Arguments that a task
    supplies (`create_kwargs` and `execute_kwargs` in its `tools_kwargs`) are hidden from the model: they are not in the
    schema (`schema_without`), and the model may not pass them.

    A sync function runs in a worker process, which is killed when a call exceeds its deadline; the process imports the
    module again and holds its globals. With `isolate=False` it runs in a thread of the trainer, where a call that hangs
    can only be abandoned; so does a function that another process cannot import. `isolate=True` requires a process,
    also for an async function.
    """

    def __init__(
        self,
        function: Callable[P, R],
        *,
        name: str | None = None,
        description: str | None = None,
        family: str | None = None,
        price: float | None = None,
        isolate: bool | None = None,
        max_concurrent: int | None = None,
    ) -> None:
        self.function = function
        name = name if name is not None else getattr(function, "__name__", type(function).__name__)
        if not _TOOL_NAME.fullmatch(name):
            raise ToolwiseError(f"tool {name!r}: use 1 to 64 letters, digits, _ or - as @tool(name=…)")
        options = {"family": family, "price": price, "max_concurrent": max_concurrent}
        config = {key: value for key, value in options.items() if value is not None}
        check_tool_options({**config, "isolate": isolate}, f"tool {name}")
        annotations = read_annotations(function, name)
        self._adapters = {key: make_adapter(annotation, name, key) for key, annotation in annotations.items()}
        self._returns_reward = returns_reward(function)
        super().__init__(config, build_tool_schema(function, name, description, self._adapters))
        functools.update_wrapper(self, function)
        self.isolate = isolate
        self._create_kwargs: dict[str, dict[str, Any]] = {}  # instance id -> the task's `create_kwargs`
        self._warned_of_tuple = False
        self._schemas: dict[frozenset[str], OpenAIFunctionToolSchema] = {}
        self._lacks_file = lacks_file(function)  # a notebook function: each run writes a file for it
        self._registration: Registration | str | None = "not looked up"
        self._target = None if self._lacks_file else self._find_target()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def with_options(self, **options: Any) -> FunctionTool[P, R]:
        """The same function with another description, family, price or other option."""
        current = {"description": self.tool_schema.function.description, "isolate": self.isolate, **self.config}
        return FunctionTool(self.function, name=self.name, **{**current, **options})

    def check_task_arguments(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Convert arguments of a task to the annotated types; rejects those that the function does not accept."""
        arguments: dict[str, Any] = {}
        for key, value in kwargs.items():
            if key not in self._adapters:
                takes = ", ".join(self._adapters) or "no arguments"
                raise ToolwiseError(f"tool {self.name} takes no argument {key!r}: it takes {takes}")
            if key in ("instance_id", "parameters"):
                raise ToolwiseError(f"tool {self.name}: a task cannot pass an argument named {key}: rename it")
            try:
                arguments[key] = self._adapters[key].validate_python(value)
            except ValidationError as error:
                problem = error.errors()[0]["msg"]
                raise ToolwiseError(f"tool {self.name}, argument {key!r}: {problem}, got {value!r:.60}") from None
        return arguments

    def schema_without(self, names: Collection[str]) -> OpenAIFunctionToolSchema:
        """The schema shown to the model when the task supplies the arguments `names`."""
        key = frozenset(names)
        if key and key not in self._schemas:
            parameters = self.tool_schema.function.parameters
            remaining = {
                **parameters,
                "properties": {name: part for name, part in parameters["properties"].items() if name not in key},
                "required": [name for name in parameters["required"] if name not in key],
            }
            function = self.tool_schema.function.model_copy(update={"parameters": remaining})
            self._schemas[key] = self.tool_schema.model_copy(update={"function": function})
        return self._schemas[key] if key else self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        instance_id = await super().create(instance_id)
        if kwargs:
            self.check_task_arguments(kwargs)
            self._create_kwargs[instance_id] = kwargs
        return instance_id

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
        if self._lacks_file and self._registration != (registration := registration_of(self.function)):
            self._target, self._registration = self._find_target(), registration
        kwargs = {**self._create_kwargs.get(instance_id, {}), **kwargs}
        self.check_task_arguments(kwargs)
        if self._target is not None and not in_virtual_time() and self._resolves_to_function(self._target):
            try:
                return self._warn_of_tuple(await isolation.shared_pool().run(self._target, parameters, kwargs))
            except LoadFault as fault:
                if self._target is not None:  # of several concurrent calls only the first reports it
                    self._disable_isolation(str(fault))
        try:
            call = self._bind(parameters, kwargs)
        except ValueError as error:
            return f"error: {error}", None, {"ok": False}
        if inspect.iscoroutinefunction(self.function) or in_virtual_time():
            value = call()
        else:
            value = await call_in_thread(call, name=f"tool {self.name}")
        if inspect.isawaitable(value):
            value = await value
        return self._warn_of_tuple(self._result(value))

    def call_sync(
        self, parameters: Mapping[str, Any], wait: Callable[[Awaitable[Any]], Any], kwargs: Mapping[str, Any]
    ) -> ToolResult:
        """One call in the current thread, as in a worker process; `wait` runs an awaitable to completion."""
        try:
            call = self._bind(parameters, kwargs)
        except ValueError as error:
            return f"error: {error}", None, {"ok": False}
        value = call()
        return self._result(wait(value) if inspect.isawaitable(value) else value)

    def _find_target(self) -> ObjectRef | None:
        """The reference by which a worker process imports the function; None if it runs in this process."""
        in_process = self.isolate is False or (self.isolate is None and inspect.iscoroutinefunction(self.function))
        if in_process or in_worker():
            return None
        try:
            return ObjectRef.of(self.function)
        except ToolwiseError as fault:
            self._disable_isolation(str(fault))
            return None

    def _resolves_to_function(self, target: ObjectRef) -> bool:
        """Whether the reference resolves to this function. Checked late: a decorator runs before the name is bound."""
        if registered_reference(self.function) is not None:  # its file was generated from this function
            return True
        resolved = None
        with suppress(KeyError, AttributeError):
            resolved = target.find(sys.modules[self.function.__module__])
        if resolved is self or resolved is self.function or getattr(resolved, "function", None) is self.function:
            return True
        self._disable_isolation(f"{target.name} in {target.module_ref} is another function")
        return False

    def _disable_isolation(self, reason: str) -> None:
        """Fall back to a thread, unless `isolate=True` forbids it."""
        if self.isolate:
            raise ToolwiseError(f"tool {self.name}: isolate=True runs it in a worker process, but {reason}")
        log.warning("tool %s runs in a thread, where a call that hangs can only be abandoned: %s", self.name, reason)
        self._target = None

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self._create_kwargs.pop(instance_id, None)

    def _bind(self, parameters: Mapping[str, Any], kwargs: Mapping[str, Any]) -> Callable[[], Any]:
        """The function with the model's and the task's arguments, converted to the annotated types: an enum's value
        becomes a member, 3 becomes 3.0. Raises `ValueError` for a mistake of the model, `ToolwiseError` for one in the
        task."""
        arguments = self.check_task_arguments(kwargs)
        for key in self.tool_schema.function.parameters["required"]:
            if key not in parameters and key not in kwargs:
                raise ValueError(f"missing argument {key!r}")
        for key, value in parameters.items():
            if key not in self._adapters or key in kwargs:
                raise ValueError(f"unexpected argument {key!r}")
            try:
                arguments[key] = self._adapters[key].validate_python(value)
            except ValidationError as error:
                raise ValueError(f"argument {key!r}: {error.errors()[0]['msg']}") from None
        return functools.partial(cast("Callable[..., Any]", self.function), **arguments)

    def _result(self, value: Any) -> ToolResult:
        if not self._returns_reward:
            info = {"ok": True, _TUPLE_KEY: True} if _looks_like_reward(value) else {"ok": True}
            return self._text(value), None, info
        if not isinstance(value, tuple) or len(value) not in (2, 3):
            raise ToolwiseError(f"tool {self.name} must return (text, reward) or (text, reward, info)")
        text, reward, info = (*value, {})[:3]
        if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)):
            raise ToolwiseError(f"tool {self.name} returned the reward {reward!r:.80}: return a number or None")
        if not isinstance(info, Mapping):
            raise ToolwiseError(f"tool {self.name} returned the info {info!r:.80}: return a dictionary")
        return self._text(text), None if reward is None else float(reward), {"ok": True, **info}

    def _warn_of_tuple(self, result: ToolResult) -> ToolResult:
        """Warn about a tuple without annotation. Workers mark such results, so that the trainer warns only once."""
        if result[2].pop(_TUPLE_KEY, False) and not self._warned_of_tuple:
            self._warned_of_tuple = True
            log.warning(
                "tool %s returned (text, reward), which the model reads as JSON and which gives no reward: annotate "
                "-> tuple[str, float] to give a reward, or return a list",
                self.name,
            )
        return result

    def _text(self, value: Any) -> str:
        if isinstance(value, str):
            return value
        try:
            return json.dumps(to_jsonable_python(value), ensure_ascii=False)
        except (PydanticSerializationError, ValueError) as error:
            raise ToolwiseError(f"tool {self.name} returned a value that is not JSON: {error}") from error


def _looks_like_reward(value: Any) -> bool:
    """(text, number) or (text, number, mapping)."""
    if not isinstance(value, tuple) or len(value) not in (2, 3) or isinstance(value[1], bool):
        return False
    return isinstance(value[0], str) and isinstance(value[1], int | float) and isinstance((*value, {})[2], Mapping)


@overload
def tool(function: Callable[P, R], /) -> FunctionTool[P, R]: ...
@overload
def tool(
    *,
    name: str | None = None,
    family: str | None = None,
    price: float | None = None,
    description: str | None = None,
    isolate: bool | None = None,
    max_concurrent: int | None = None,
) -> Callable[[Callable[P, R]], FunctionTool[P, R]]: ...
def tool(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Make a tool from a typed function: `@tool`, or with options `@tool(family="SEARCH", price=0.5)`.

    `isolate` selects where it runs: in a worker process (True), in this process (False), or by the rules of
    `FunctionTool` (None). `max_concurrent` limits the concurrent calls over all rollouts.
    """
    return functools.partial(FunctionTool, **options) if function is None else FunctionTool(function, **options)


def as_tool(obj: BaseTool | Callable[..., Any]) -> BaseTool:
    """Return `obj` if it is a tool, else make a tool from a plain function."""
    if isinstance(obj, BaseTool):
        return obj
    if inspect.isroutine(obj):
        return FunctionTool(obj)
    raise ToolwiseError(f"{obj!r:.80} is not a tool: pass a BaseTool or a typed function")


def check_option_names(config: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    known = sorted(known)
    for key in config:
        if key not in known:
            hint = did_you_mean(str(key), known) or f"; it has {', '.join(known)}"
            raise ConfigError(f"tools: {where} has no option {key!r}{hint}")


def checked(value: Any, kind: Any, where: str, expected: str) -> Any:
    """`value` if it is of the type `kind`, without conversion; else an error that says what was `expected`."""
    try:
        return TypeAdapter(kind).validate_python(value, strict=True)
    except ValidationError:
        raise ConfigError(f"{where} must be {expected}, got {value!r:.80}") from None


def checked_seconds(value: Any, where: str) -> float:
    return float(checked(value, PositiveNumber, where, "a number of seconds above 0"))


def check_tool_options(config: Mapping[str, Any], where: str) -> None:
    """Validate the options used by the router, the budget and the scheduler."""
    known = f"one of {', '.join(FAMILIES)}, or a name of your own for routes of your own"
    family = checked(config.get("family", "OTHER"), FamilyName, f"{where}: family", known)
    if family.upper() not in FAMILIES and (hint := did_you_mean(family.upper(), FAMILIES)):
        raise ConfigError(f"{where}: family must be {known}, got {family!r}{hint}")
    checked(config.get("price", 0.0), NonNegativeNumber, f"{where}: price", "a number ≥ 0")
    checked(config.get("max_concurrent"), PositiveInt | None, f"{where}: max_concurrent", "an integer ≥ 1")
    if config.get("isolate") not in (None, True, False):
        raise ConfigError(f"{where}: isolate must be true or false, got {config['isolate']!r}")
