"""A tool's JSON schema: built from a function's signature and docstring, and checked against a model's arguments.

Problems with arguments are written for models to read.
"""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from pydantic import TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic_core import to_jsonable_python

from toolwise.errors import ToolwiseError
from toolwise.tools.base import FunctionSchema, OpenAIFunctionToolSchema
from toolwise.untrusted.json_schema import ValidationLimitError, argument_errors, compile_parameters

if TYPE_CHECKING:
    from jsonschema import ValidationError

MAX_PROBLEMS = 10
MAX_PROBLEM_LENGTH = 200

_JSON_NAMES: dict[type, str] = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    list: "an array",
    dict: "an object",
    type(None): "null",
}
_TYPE_NAMES = {name.split()[-1]: name for name in _JSON_NAMES.values()}
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
    if annotation is tuple or annotation is typing.Tuple:  # noqa: UP006
        return True
    members = typing.get_args(annotation)
    return typing.get_origin(annotation) is tuple and members[:1] == (str,) and len(members) in (2, 3)


def build_tool_schema(
    function: Callable[..., Any], name: str, description: str | None, adapters: Mapping[str, TypeAdapter[Any]]
) -> OpenAIFunctionToolSchema:
    text, notes = read_docstring(inspect.getdoc(function) or "")
    defaults = {key: parameter.default for key, parameter in inspect.signature(function).parameters.items()}
    required = [key for key, default in defaults.items() if default is inspect.Parameter.empty]
    properties: dict[str, Any] = {}
    for key, default in defaults.items():
        properties[key] = _inline_refs(adapters[key].json_schema(), f"tool {name}: parameter {key!r}")
        if key in notes:
            properties[key]["description"] = notes[key]
        if key not in required and default is not None:
            properties[key]["default"] = to_jsonable_python(default, fallback=str)
    return OpenAIFunctionToolSchema(
        function=FunctionSchema(
            name=name,
            description=text if description is None else description,
            parameters={"type": "object", "properties": properties, "required": required},
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


def validate_arguments(schema: OpenAIFunctionToolSchema, arguments: Any) -> list[str]:
    """The problems with `arguments`, one line each, in a fixed order; empty if they are valid."""
    if not isinstance(arguments, dict):
        return ["the arguments must be a JSON object"]
    checks = _compiled_schema(schema.function)
    if checks.passes_fast_check(arguments):
        return []
    found = argument_errors(schema.function.name, checks.validator, arguments)
    try:
        errors = sorted(found, key=lambda error: _path(error.path))
    except ValidationLimitError as limit:
        return [f"the arguments are {limit}"]
    problems = [problem for error in errors for problem in _problems(error)]
    return [_one_line(problem) for problem in problems[:MAX_PROBLEMS]]


@dataclass(frozen=True, slots=True)
class _CompiledSchema:
    """A tool's schema, prepared for validation."""

    parameters: dict[str, Any]
    snapshot: dict[str, Any]
    validator: Any
    types: dict[str, tuple[type, ...]] | None
    """The allowed types of each argument if the schema has only plain types, else None. Checking these takes a tenth
    of the validator's time."""

    def passes_fast_check(self, arguments: dict[str, Any]) -> bool:
        """True if the arguments are certainly valid; otherwise the validator decides."""
        types = self.types
        if types is None or any(type(value) not in types.get(name, ()) for name, value in arguments.items()):
            return False
        return all(name in arguments for name in self.parameters.get("required", ()))


_PLAIN = {"string": (str,), "boolean": (bool,), "integer": (int,), "number": (int, float), "null": (type(None),)}
_ANNOTATION_KEYWORDS = {"type", "description", "title", "default", "examples"}
_cache: dict[int, _CompiledSchema] = {}  # keyed by the `id` of a tool's `parameters`
_MAX_CACHED = 1024


def _compiled_schema(function: FunctionSchema) -> _CompiledSchema:
    """`compile_parameters` without serializing the schema on every call; notices a schema changed in place."""
    parameters = function.parameters
    compiled = _cache.get(id(parameters))
    if compiled is None or compiled.parameters is not parameters or compiled.snapshot != parameters:
        if len(_cache) >= _MAX_CACHED:
            _cache.clear()
        validator = compile_parameters(function.name, json.dumps(parameters, sort_keys=True))
        compiled = _CompiledSchema(parameters, deepcopy(parameters), validator, _plain_types(parameters))
        _cache[id(parameters)] = compiled
    return compiled


def _plain_types(parameters: dict[str, Any]) -> dict[str, tuple[type, ...]] | None:
    properties = parameters.get("properties", {})
    if parameters.get("type") != "object" or not isinstance(properties, dict):
        return None
    if parameters.keys() - {"properties", "required", "additionalProperties"} - _ANNOTATION_KEYWORDS:
        return None
    types: dict[str, tuple[type, ...]] = {}
    for name, schema in properties.items():
        type_name = (
            schema.get("type") if isinstance(schema, dict) and not schema.keys() - _ANNOTATION_KEYWORDS else None
        )
        if not isinstance(type_name, str) or type_name not in _PLAIN:
            return None
        types[name] = _PLAIN[type_name]
    return types


def _problems(error: ValidationError) -> Iterable[str]:
    if error.validator == "required":
        missing = [name for name in error.validator_value if name not in error.instance]
        # jsonschema raises one error per missing name, and names it only in the message.
        named = next((name for name in missing if error.message.startswith(repr(name))), missing[0])
        return [f"missing argument {_path([*error.path, named])!r}"]
    if error.validator == "additionalProperties" and error.validator_value is False:
        known = sorted(error.schema.get("properties", {}))
        extra = [name for name in error.instance if name not in known]
        expected = f" (expected: {', '.join(known)})" if known else ""
        return [f"unexpected argument {_path([*error.path, name])!r}{expected}" for name in extra]
    return [_describe_error(error, f"argument {_path(error.path)!r}" if error.path else "the arguments")]


def _describe_error(error: ValidationError, subject: str) -> str:
    if expected := _expected_types(error):
        types = " or ".join(_TYPE_NAMES.get(name, name) for name in expected)
        return f"{subject} must be {types}, got {_JSON_NAMES.get(type(error.instance), 'something else')}"
    if error.validator == "enum":
        choices = ", ".join(json.dumps(choice, ensure_ascii=False) for choice in error.validator_value)
        return f"{subject} must be one of {choices}"
    return f"{subject}: {error.message}"


def _expected_types(error: ValidationError) -> list[str]:
    """The accepted types, if the error is only about the type."""
    value = error.validator_value
    if error.validator == "type":
        return value if isinstance(value, list) else [value]
    # `int | None` becomes alternatives with only a type.
    only_types = error.validator == "anyOf" and all(set(choice) == {"type"} for choice in value)
    return [choice["type"] for choice in value] if only_types else []


def _path(parts: Iterable[str | int]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")


def _one_line(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= MAX_PROBLEM_LENGTH else flat[: MAX_PROBLEM_LENGTH - 1] + "…"
