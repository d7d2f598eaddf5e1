"""Validates a model's arguments against a tool's JSON schema before the call, with messages written for models."""

from __future__ import annotations

import json
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
_cache: dict[int, _CompiledSchema] = {}
"""Keyed by the `id` of a tool's `parameters`."""
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
    where = _path(error.path)
    if error.validator == "required":
        missing = [name for name in error.validator_value if name not in error.instance]
        # jsonschema raises one error per missing name, and names it only in the message.
        named = next((name for name in missing if error.message.startswith(repr(name))), missing[0])
        return [f"missing argument {_join(where, named)!r}"]
    if error.validator == "additionalProperties" and error.validator_value is False:
        known = sorted(error.schema.get("properties", {}))
        extra = [name for name in error.instance if name not in known]
        expected = f" (expected: {', '.join(known)})" if known else ""
        return [f"unexpected argument {_join(where, name)!r}{expected}" for name in extra]
    return [_describe_error(error, f"argument {where!r}" if where else "the arguments")]


def _describe_error(error: ValidationError, subject: str) -> str:
    expected = _expected_types(error)
    if expected:
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
    if error.validator == "anyOf" and all(set(choice) == {"type"} for choice in value):
        return [choice["type"] for choice in value]
    return []


def _path(parts: Iterable[str | int]) -> str:
    path = ""
    for part in parts:
        path = f"{path}[{part}]" if isinstance(part, int) else _join(path, part)
    return path


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _one_line(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= MAX_PROBLEM_LENGTH else flat[: MAX_PROBLEM_LENGTH - 1] + "…"
