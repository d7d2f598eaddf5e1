"""Checks a model's arguments against a tool's JSON schema before the tool sees them, in words for models."""

from __future__ import annotations

import json
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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


def validate_arguments(schema: OpenAIFunctionToolSchema, arguments: Any) -> list[str]:
    """What is wrong with `arguments`, one line a problem, in a fixed order; empty where they fit."""
    if not isinstance(arguments, dict):
        return ["the arguments must be a JSON object"]
    checks = _compiled_schema(schema.function)
    if checks.passes_fast_check(arguments):
        return []
    validator = checks.validator
    try:
        errors = sorted(argument_errors(validator, arguments), key=lambda error: _path(error.path))
    except RecursionError:
        return ["the arguments are nested too deeply"]
    except ValidationLimitError:
        return ["the arguments are too much to check"]
    except Exception as error:
        from referencing.exceptions import Unresolvable  # not at every call: even that takes its time

        if not isinstance(error, Unresolvable | ValueError):  # the latter: it is no address at all
            raise
        name = schema.function.name
        raise ToolwiseError(f"tool {name}: its schema has a $ref that leads nowhere: {error}") from error
    problems = [problem for error in errors for problem in _problems(error)]
    return [_one_line(problem) for problem in problems[:MAX_PROBLEMS]]


@dataclass(frozen=True, slots=True)
class _CompiledSchema:
    """What a schema comes to."""

    parameters: dict[str, Any]
    snapshot: dict[str, Any]
    validator: Any
    types: dict[str, tuple[type, ...]] | None
    """Where it asks for nothing but plain types: those of each argument. A validator takes ten times as long to see
    that a string is a string."""

    def passes_fast_check(self, arguments: dict[str, Any]) -> bool:
        """Beyond doubt. What is not may still be right: that is the validator's to say."""
        types = self.types
        if types is None or any(type(value) not in types.get(name, ()) for name, value in arguments.items()):
            return False
        return all(name in arguments for name in self.parameters.get("required", ()))


_PLAIN = {"string": (str,), "boolean": (bool,), "integer": (int,), "number": (int, float), "null": (type(None),)}
_ANNOTATION_KEYWORDS = {"type", "description", "title", "default", "examples"}
_cache: dict[int, _CompiledSchema] = {}
"""By the id of a tool's parameters."""
_MAX_CACHED = 1024


def _compiled_schema(function: FunctionSchema) -> _CompiledSchema:
    """`compile_parameters` without writing the schema as text at every call; a schema changed in place is seen."""
    parameters = function.parameters
    known = _cache.get(id(parameters))
    if known is None or known.parameters is not parameters or known.snapshot != parameters:
        if len(_cache) >= _MAX_CACHED:
            _cache.clear()
        validator = compile_parameters(function.name, json.dumps(parameters, sort_keys=True))
        known = _CompiledSchema(parameters, deepcopy(parameters), validator, _plain_types(parameters))
        _cache[id(parameters)] = known
    return known


def _plain_types(parameters: dict[str, Any]) -> dict[str, tuple[type, ...]] | None:
    properties = parameters.get("properties", {})
    if parameters.get("type") != "object" or not isinstance(properties, dict):
        return None
    if parameters.keys() - {"properties", "required", "additionalProperties"} - _ANNOTATION_KEYWORDS:
        return None
    found: dict[str, tuple[type, ...]] = {}
    for name, wanted in properties.items():
        kind = wanted.get("type") if isinstance(wanted, dict) and not wanted.keys() - _ANNOTATION_KEYWORDS else None
        if not isinstance(kind, str) or kind not in _PLAIN:
            return None
        found[name] = _PLAIN[kind]
    return found


def _problems(error: ValidationError) -> Iterable[str]:
    where = _path(error.path)
    if error.validator == "required":
        missing = [name for name in error.validator_value if name not in error.instance]
        # jsonschema gives each missing name an error of its own, and says which only in the message.
        named = next((name for name in missing if error.message.startswith(repr(name))), missing[0])
        return [f"missing argument {_join(where, named)!r}"]
    if error.validator == "additionalProperties" and error.validator_value is False:
        known = sorted(error.schema.get("properties", {}))
        extra = [name for name in error.instance if name not in known]
        expected = f" (expected: {', '.join(known)})" if known else ""
        return [f"unexpected argument {_join(where, name)!r}{expected}" for name in extra]
    return [_describe_error(error, f"argument {where!r}" if where else "the arguments")]


def _describe_error(error: ValidationError, subject: str) -> str:
    wanted = _expected_types(error)
    if wanted:
        types = " or ".join(_TYPE_NAMES.get(name, name) for name in wanted)
        return f"{subject} must be {types}, got {_JSON_NAMES.get(type(error.instance), 'something else')}"
    if error.validator == "enum":
        choices = ", ".join(json.dumps(choice, ensure_ascii=False) for choice in error.validator_value)
        return f"{subject} must be one of {choices}"
    return f"{subject}: {error.message}"


def _expected_types(error: ValidationError) -> list[str]:
    """The types that would have done, where the error is about nothing else."""
    value = error.validator_value
    if error.validator == "type":
        return value if isinstance(value, list) else [value]
    # What `int | None` becomes: alternatives that say no more than a type.
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
