"""Typed Python functions as tools: the JSON schema comes from the signature and the docstring."""

from __future__ import annotations

import functools
import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any, Generic, ParamSpec, TypeVar, cast, overload

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import PydanticSerializationError, to_jsonable_python

from toolwise.errors import ToolwiseError
from toolwise.tools.base import BaseTool, FunctionSchema, OpenAIFunctionToolSchema
from toolwise.waiting import in_thread

P = ParamSpec("P")
R = TypeVar("R")

FAMILIES = ("SEARCH", "CALCULATE", "OTHER")

_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SECTION = re.compile(r"(?i)(args|arguments|parameters|returns?|yields?|raises|examples?|notes?)\s*:\s*$")
_ARGS_ENTRY = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")
_FIELD_ENTRY = re.compile(r":(\w+)([^:]*):\s*(.*)")


class FunctionTool(BaseTool, Generic[P, R]):
    """A function as a tool; calling the object calls the function.

    What the function returns is what the model reads: a string as it is, anything else as JSON. One that is
    annotated `-> tuple` (or `tuple[str, …]` of two or three) returns (text, reward) or (text, reward, info).
    A task's `execute_kwargs` are not passed on: the function sees the model's arguments and nothing else.
    """

    def __init__(
        self,
        function: Callable[P, R],
        *,
        name: str | None = None,
        description: str | None = None,
        family: str | None = None,
        price: float | None = None,
    ) -> None:
        self.function = function
        name = name if name is not None else getattr(function, "__name__", type(function).__name__)
        if not _TOOL_NAME.fullmatch(name):
            raise ToolwiseError(f"tool {name!r}: use 1 to 64 letters, digits, _ or - as @tool(name=…)")
        given = {"family": family, "price": price}
        config = {key: value for key, value in given.items() if value is not None}
        check_terms(config, f"tool {name}")
        annotations = _annotations(function, name)
        self._adapters = {key: _adapter(annotation, name, key) for key, annotation in annotations.items()}
        self._returns_reward = _returns_reward(function)
        super().__init__(config, _tool_schema(function, name, description, self._adapters))
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def with_terms(self, **terms: Any) -> FunctionTool[P, R]:
        """The same function under another description, family or price."""
        mine = {"description": self.tool_schema.function.description, **self.config}
        return FunctionTool(self.function, name=self.name, **{**mine, **terms})

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        return await super().create(instance_id, **kwargs)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[str, float | None, dict[str, Any]]:
        try:
            arguments = self._read(parameters)
        except ValueError as error:
            return f"error: {error}", None, {"ok": False}
        function = cast("Callable[..., Any]", self.function)
        if inspect.iscoroutinefunction(function):
            value = await function(**arguments)
        else:
            value = await in_thread(functools.partial(function, **arguments))
            if inspect.isawaitable(value):
                value = await value
        return self._result(value)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        return None

    def _read(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """The model's arguments as the function's types: an enum's value becomes a member, 3 becomes 3.0."""
        arguments: dict[str, Any] = {}
        for key in self.tool_schema.function.parameters["required"]:
            if key not in parameters:
                raise ValueError(f"missing argument {key!r}")
        for key, value in parameters.items():
            if key not in self._adapters:
                raise ValueError(f"unexpected argument {key!r}")
            try:
                arguments[key] = self._adapters[key].validate_python(value)
            except ValidationError as error:
                raise ValueError(f"argument {key!r}: {error.errors()[0]['msg']}") from None
        return arguments

    def _result(self, value: Any) -> tuple[str, float | None, dict[str, Any]]:
        if not self._returns_reward:
            return self._text(value), None, {"ok": True}
        if not isinstance(value, tuple) or len(value) not in (2, 3):
            raise ToolwiseError(f"tool {self.name} must return (text, reward) or (text, reward, info)")
        text, reward, info = (*value, {})[:3]
        if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)):
            raise ToolwiseError(f"tool {self.name} returned the reward {reward!r:.80}: return a number or None")
        if not isinstance(info, Mapping):
            raise ToolwiseError(f"tool {self.name} returned the info {info!r:.80}: return a dictionary")
        return self._text(text), None if reward is None else float(reward), {"ok": True, **info}

    def _text(self, value: Any) -> str:
        if isinstance(value, str):
            return value
        try:
            return json.dumps(to_jsonable_python(value), ensure_ascii=False)
        except (PydanticSerializationError, ValueError) as error:
            raise ToolwiseError(f"tool {self.name} returned what is no JSON: {error}") from error


@overload
def tool(function: Callable[P, R], /) -> FunctionTool[P, R]: ...
@overload
def tool(
    *,
    name: str | None = None,
    family: str | None = None,
    price: float | None = None,
    description: str | None = None,
) -> Callable[[Callable[P, R]], FunctionTool[P, R]]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    family: str | None = None,
    price: float | None = None,
    description: str | None = None,
) -> Any:
    """Makes a tool of a typed function: `@tool`, or with its terms `@tool(family="SEARCH", price=0.5)`."""

    def make(target: Callable[..., Any]) -> FunctionTool[..., Any]:
        return FunctionTool(target, name=name, description=description, family=family, price=price)

    return make if function is None else make(function)


def as_tool(obj: BaseTool | Callable[..., Any]) -> BaseTool:
    """`obj` itself where it is a tool, or a tool made of the plain function that it is."""
    if isinstance(obj, BaseTool):
        return obj
    if inspect.isroutine(obj):
        return FunctionTool(obj)
    raise ToolwiseError(f"{obj!r:.80} is no tool: a BaseTool or a typed function is needed")


def check_terms(config: Mapping[str, Any], where: str) -> None:
    """Refuses a family or a price that the router and the budget could not go by."""
    family, price = config.get("family", "OTHER"), config.get("price", 0.0)
    if family not in FAMILIES:
        raise ToolwiseError(f"{where}: family must be one of {', '.join(FAMILIES)}, got {family!r}")
    if isinstance(price, bool) or not isinstance(price, int | float) or not 0 <= price < float("inf"):
        raise ToolwiseError(f"{where}: price must be a number from 0 up, got {price!r}")


def _annotations(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """parameter -> its type, in order; refuses what a model could not fill in by name."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise ToolwiseError(f"tool {name}: its annotations cannot be read: {error}") from error
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ToolwiseError(
                f"tool {name}: parameter {parameter} cannot be given by name; list the arguments one by one"
            )
        if parameter.name not in hints:
            raise ToolwiseError(f"tool {name}: parameter {parameter.name!r} needs a type annotation")
    return {key: hints[key] for key in inspect.signature(function).parameters}


def _adapter(annotation: Any, name: str, parameter: str) -> TypeAdapter[Any]:
    try:
        adapter = TypeAdapter[Any](annotation)
        adapter.json_schema()
    except PydanticUserError as error:
        raise ToolwiseError(
            f"tool {name}: parameter {parameter!r} has a type without a JSON schema: {annotation!r}"
        ) from error
    return adapter


def _returns_reward(function: Callable[..., Any]) -> bool:
    annotation = typing.get_type_hints(function).get("return")
    members = typing.get_args(annotation)
    if annotation is tuple or annotation is typing.Tuple:  # noqa: UP006
        return True
    return typing.get_origin(annotation) is tuple and members[:1] == (str,) and len(members) in (2, 3)


def _tool_schema(
    function: Callable[..., Any], name: str, description: str | None, adapters: Mapping[str, TypeAdapter[Any]]
) -> OpenAIFunctionToolSchema:
    text, notes = read_docstring(inspect.getdoc(function) or "")
    properties: dict[str, Any] = {}
    required: list[str] = []
    for key, parameter in inspect.signature(function).parameters.items():
        schema = _tidy(adapters[key].json_schema(), f"tool {name}: parameter {key!r}")
        if key in notes:
            schema["description"] = notes[key]
        if parameter.default is parameter.empty:
            required.append(key)
        elif parameter.default is not None:
            schema["default"] = to_jsonable_python(parameter.default, fallback=str)
        properties[key] = schema
    parameters = {"type": "object", "properties": properties, "required": required}
    return OpenAIFunctionToolSchema(
        function=FunctionSchema(
            name=name, description=text if description is None else description, parameters=parameters
        )
    )


def _tidy(schema: dict[str, Any], where: str) -> dict[str, Any]:
    """`schema` with its `$defs` written out and without titles: models read it, and pay by the token."""
    definitions = schema.pop("$defs", {})

    def walk(node: Any, inside: tuple[str, ...]) -> Any:
        if isinstance(node, list):
            return [walk(item, inside) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            target = node["$ref"].rpartition("/")[2]
            if target in inside:
                raise ToolwiseError(f"{where} has a type that refers to itself ({target})")
            beside = {key: value for key, value in node.items() if key != "$ref"}
            return walk({**definitions[target], **beside}, (*inside, target))
        tidied = {}
        for key, value in node.items():
            if key == "properties":
                tidied[key] = {name: walk(item, inside) for name, item in value.items()}
            elif key in ("enum", "const", "default", "examples"):
                tidied[key] = value
            elif key != "title":
                tidied[key] = walk(value, inside)
        return tidied

    return cast("dict[str, Any]", walk(schema, ()))


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """What a docstring says of the function, and of each parameter (Google's `Args:` or `:param x:`)."""
    description: list[str] = []
    notes: dict[str, list[str]] = {}
    section = ""
    note: list[str] | None = None
    entry_indent = 0
    for line in inspect.cleandoc(text).splitlines():
        indent, stripped = len(line) - len(line.lstrip()), line.strip()
        if indent == 0 and (heading := _SECTION.match(stripped)):
            section, note, entry_indent = heading[1].lower(), None, 0
        elif field := _FIELD_ENTRY.match(stripped) if stripped.startswith(":") else None:
            section, note = "fields", None
            if field[1] in ("param", "parameter", "arg", "argument") and (words := field[2].split()):
                note = notes.setdefault(words[-1], [field[3]])
        elif section == "":
            description.append(stripped)
        elif section in ("args", "arguments", "parameters"):
            entry_indent = entry_indent or indent
            if indent <= entry_indent and (entry := _ARGS_ENTRY.match(stripped)):
                note = notes.setdefault(entry[1], [entry[2]])
            elif note is not None:
                note.append(stripped)
        elif section == "fields" and note is not None and stripped:
            note.append(stripped)
    joined = {key: " ".join(part for part in parts if part) for key, parts in notes.items()}
    return "\n".join(description).strip(), {key: note for key, note in joined.items() if note}
