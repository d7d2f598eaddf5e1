"""Builds a tool schema from a function's signature and docstring, and type adapters for its arguments."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any, cast

from pydantic import TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic_core import to_jsonable_python

from toolwise.errors import ToolwiseError
from toolwise.tools.base import FunctionSchema, OpenAIFunctionToolSchema

_SECTION = re.compile(r"(?i)(args|arguments|parameters|returns?|yields?|raises|examples?|notes?)\s*:\s*$")
_ARGS_ENTRY = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")
_FIELD_ENTRY = re.compile(r":(\w+)([^:]*):\s*(.*)")


def read_annotations(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """parameter -> type, in order; rejects parameters that cannot be passed by name."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise ToolwiseError(f"tool {name}: cannot resolve its annotations: {error}") from error
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ToolwiseError(
                f"tool {name}: parameter {parameter} cannot be passed by name; list the arguments one by one"
            )
        if parameter.name not in hints:
            raise ToolwiseError(f"tool {name}: parameter {parameter.name!r} needs a type annotation")
    return {key: hints[key] for key in inspect.signature(function).parameters}


def make_adapter(annotation: Any, name: str, parameter: str) -> TypeAdapter[Any]:
    try:
        adapter = TypeAdapter[Any](annotation)
        adapter.json_schema()
    except PydanticUserError as error:
        raise ToolwiseError(
            f"tool {name}: parameter {parameter!r} has a type without a JSON schema: {annotation!r}"
        ) from error
    return adapter


def returns_reward(function: Callable[..., Any]) -> bool:
    annotation = typing.get_type_hints(function).get("return")
    members = typing.get_args(annotation)
    if annotation is tuple or annotation is typing.Tuple:  # noqa: UP006
        return True
    return typing.get_origin(annotation) is tuple and members[:1] == (str,) and len(members) in (2, 3)


def build_tool_schema(
    function: Callable[..., Any], name: str, description: str | None, adapters: Mapping[str, TypeAdapter[Any]]
) -> OpenAIFunctionToolSchema:
    text, notes = read_docstring(inspect.getdoc(function) or "")
    properties: dict[str, Any] = {}
    required: list[str] = []
    for key, parameter in inspect.signature(function).parameters.items():
        schema = _inline_refs(adapters[key].json_schema(), f"tool {name}: parameter {key!r}")
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


def _inline_refs(schema: dict[str, Any], where: str) -> dict[str, Any]:
    """`schema` with `$defs` inlined and titles dropped: models read it, and every token costs."""
    definitions = schema.pop("$defs", {})

    def walk(node: Any, parents: tuple[str, ...]) -> Any:
        if isinstance(node, list):
            return [walk(item, parents) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            target = node["$ref"].rpartition("/")[2]
            if target in parents:
                raise ToolwiseError(f"{where} has a type that refers to itself ({target})")
            siblings = {key: value for key, value in node.items() if key != "$ref"}
            return walk({**definitions[target], **siblings}, (*parents, target))
        result = {}
        for key, value in node.items():
            if key == "properties":
                result[key] = {name: walk(item, parents) for name, item in value.items()}
            elif key in ("enum", "const", "default", "examples"):
                result[key] = value
            elif key != "title":
                result[key] = walk(value, parents)
        return result

    return cast("dict[str, Any]", walk(schema, ()))


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description and the parameter notes in a docstring (Google's `Args:` or `:param x:`)."""
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
