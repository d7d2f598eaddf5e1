"""A tool's parameters as a compiled JSON schema: what arguments are checked by, when called and when scored."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from functools import cache, lru_cache, wraps
from typing import TYPE_CHECKING, Any

from toolwise.errors import ConfigError
from toolwise.untrusted.patterns import PatternError, compile_pattern

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator, ValidationError

MAX_KEYWORD_CHECKS = 50_000
"""Keywords that are checked for one call: half a second. Two alternatives that lead back to each other are four on the
next level, and a schema of a few lines has 2**40 of them for the arguments that fit it."""
_OPEN_PROPERTY_KEYWORDS = {"patternProperties", "allOf", "anyOf", "oneOf", "$ref"}


class ValidationLimitError(Exception):
    """A schema and arguments that would take longer to check than a call is worth."""


class _CheckBudget(threading.local):
    left = math.inf


_check_budget = _CheckBudget()


def argument_errors(validator: Draft202012Validator, arguments: Any) -> Iterator[ValidationError]:
    """What is wrong with `arguments`; a `ValidationLimitError` where that takes too long to find out."""
    _check_budget.left = MAX_KEYWORD_CHECKS
    try:
        yield from validator.iter_errors(arguments)
    finally:
        _check_budget.left = math.inf


# Keyed by the schema's text, not by its identity: tasks that bring equal schemas share one validator, and a
# schema that was changed in place gets another.
@lru_cache(maxsize=1024)
def compile_parameters(tool: str, parameters: str) -> Draft202012Validator:
    """The validator of `tool`'s parameters, given as JSON text."""
    from jsonschema import Draft202012Validator, SchemaError
    from referencing import Registry

    schema = json.loads(parameters)
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise ConfigError(f"tool {tool}: its parameters are no JSON schema: {error.message:.200}") from error
    except RecursionError:
        raise ConfigError(f"tool {tool}: its parameters are nested too deeply; write fewer levels") from None
    _check_patterns(tool, schema)
    # JSON schema lets unnamed properties pass; in a call, an argument that a tool lacks is a mistake.
    if isinstance(schema, dict) and schema.get("properties") and not schema.keys() & _OPEN_PROPERTY_KEYWORDS:
        schema.setdefault("additionalProperties", False)
    # An empty registry: a $ref must never make us fetch something from the network.
    validator: Draft202012Validator = _linear_validator()(schema, registry=Registry())
    return validator


def _check_patterns(tool: str, schema: Any) -> None:
    """Refuses what a model's arguments could not be matched against in linear time."""
    keywords = set()
    for keyword, value in _keywords(schema):
        keywords.add(keyword)
        patterns = value if keyword == "patternProperties" else [value] if keyword == "pattern" else []
        for pattern in patterns:
            try:
                compile_pattern(pattern)
            except PatternError as fault:
                raise ConfigError(f"tool {tool}: {keyword} {pattern!r:.80} in its parameters: {fault}") from None
    if keywords >= {"unevaluatedProperties", "patternProperties"}:
        raise ConfigError(
            f"tool {tool}: unevaluatedProperties and patternProperties in one schema of parameters are not supported; "
            "use additionalProperties"
        )


_SCHEMA_MAP_KEYWORDS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_NON_SCHEMA_KEYWORDS = {"enum", "const", "default", "examples", "required"}


def _keywords(schema: Any) -> Iterator[tuple[str, Any]]:
    """Every keyword of a schema and of those inside it; the names of properties are none."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            for keyword, value in part.items():
                if keyword in _NON_SCHEMA_KEYWORDS:
                    continue
                yield keyword, value
                named = keyword in _SCHEMA_MAP_KEYWORDS and isinstance(value, dict)
                waiting += value.values() if named else [value]


@cache
def _linear_validator() -> Any:
    """The standard's validator, but for the keywords that `jsonschema` may take more than linear time for: patterns,
    which Python's own engine matches by backtracking, and `uniqueItems`, which compares each item with each. All are
    counted: see `argument_errors`."""
    from jsonschema import Draft202012Validator, ValidationError
    from jsonschema.validators import extend

    def pattern(validator: Any, wanted: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
        if isinstance(instance, str) and not compile_pattern(wanted).search(instance):
            yield ValidationError(f"{instance!r:.80} does not match {wanted!r}")

    def pattern_properties(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        for key, value in instance.items() if isinstance(instance, dict) else ():
            for each, inner in wanted.items():
                if compile_pattern(each).search(key):
                    yield from validator.descend(value, inner, path=key, schema_path=each)

    standard = Draft202012Validator.VALIDATORS["additionalProperties"]

    def additional_properties(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        if not isinstance(instance, dict) or "patternProperties" not in schema:
            yield from standard(validator, wanted, instance, schema)
            return
        patterns = [compile_pattern(each) for each in schema["patternProperties"]]
        rest = {k: v for k, v in instance.items() if not any(each.search(k) for each in patterns)}
        plain = {key: value for key, value in schema.items() if key != "patternProperties"}
        yield from standard(validator, wanted, rest, plain)

    def unique_items(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        if wanted and isinstance(instance, list) and len(set(map(_canonical, instance))) < len(instance):
            yield ValidationError(f"{instance!r:.80} has non-unique elements")

    whole_multiples = Draft202012Validator.VALIDATORS["multipleOf"]

    def multiple_of(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        try:
            yield from whole_multiples(validator, wanted, instance, schema) or ()
        except (OverflowError, ValueError):  # beyond what a float can be, or none
            yield ValidationError(f"{instance!r:.80} is not a multiple of {wanted}")

    own = {
        "pattern": pattern,
        "patternProperties": pattern_properties,
        "additionalProperties": additional_properties,
        "uniqueItems": unique_items,
        "multipleOf": multiple_of,
    }
    every = {**Draft202012Validator.VALIDATORS, **own}
    return extend(Draft202012Validator, {keyword: _with_check_budget(check) for keyword, check in every.items()})


def _with_check_budget(check: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(check)
    def counted(validator: Any, wanted: Any, instance: Any, schema: Any) -> Any:
        _check_budget.left -= 1
        if _check_budget.left < 0:
            raise ValidationLimitError
        return check(validator, wanted, instance, schema)

    return counted


def _canonical(value: Any) -> str:
    """The same text for values that JSON takes for the same: 1 and 1.0, but not 1 and true."""
    return json.dumps(_normalize_numbers(value), sort_keys=True)


def _normalize_numbers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _normalize_numbers(inner) for key, inner in value.items()}
    return [_normalize_numbers(inner) for inner in value] if isinstance(value, list) else value
