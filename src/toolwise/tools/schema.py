"""Checks a model's arguments against a tool's JSON schema before the tool sees them, in words for models."""

from __future__ import annotations

import json
from collections.abc import Iterable
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from toolwise.errors import ToolwiseError
from toolwise.parameters import compile_parameters
from toolwise.tools.base import FunctionSchema, OpenAIFunctionToolSchema

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
    validator = _validator_of(schema.function)
    try:
        errors = sorted(validator.iter_errors(arguments), key=lambda error: _path(error.path))
    except RecursionError:
        return ["the arguments are nested too deeply"]
    except Exception as error:
        from referencing.exceptions import Unresolvable  # not at every call: even that takes its time

        if not isinstance(error, Unresolvable):
            raise
        name = schema.function.name
        raise ToolwiseError(f"tool {name}: its schema has a $ref that leads nowhere: {error}") from error
    problems = [problem for error in errors for problem in _problems(error)]
    return [_one_line(problem) for problem in problems[:MAX_PROBLEMS]]


_known: dict[int, tuple[dict[str, Any], dict[str, Any], Any]] = {}
"""The id of a tool's parameters -> they, a copy of how they were, their validator."""
_MOST_KNOWN = 1024


def _validator_of(function: FunctionSchema) -> Any:
    """`compile_parameters` without writing the schema as text at every call; a schema changed in place is seen."""
    parameters = function.parameters
    known = _known.get(id(parameters))
    if known is None or known[0] is not parameters or known[1] != parameters:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        validator = compile_parameters(function.name, json.dumps(parameters, sort_keys=True))
        known = _known[id(parameters)] = (parameters, deepcopy(parameters), validator)
    return known[2]


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
    return [_misfit(error, f"argument {where!r}" if where else "the arguments")]


def _misfit(error: ValidationError, subject: str) -> str:
    wanted = _wanted_types(error)
    if wanted:
        types = " or ".join(_TYPE_NAMES.get(name, name) for name in wanted)
        return f"{subject} must be {types}, got {_JSON_NAMES.get(type(error.instance), 'something else')}"
    if error.validator == "enum":
        choices = ", ".join(json.dumps(choice, ensure_ascii=False) for choice in error.validator_value)
        return f"{subject} must be one of {choices}"
    return f"{subject}: {error.message}"


def _wanted_types(error: ValidationError) -> list[str]:
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
