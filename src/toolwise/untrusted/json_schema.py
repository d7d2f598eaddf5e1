"""Compiles a tool's JSON schema of parameters, to validate arguments when it is called and when calls are scored."""

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
"""Keyword checks per call, about half a second. Alternatives that refer back to each other double at every level: a
schema of a few lines can need 2**40 checks."""
_OPEN_PROPERTY_KEYWORDS = {"patternProperties", "allOf", "anyOf", "oneOf", "$ref"}


class ValidationLimitError(Exception):
    """The arguments cannot be validated against this schema: they are, as the message says, too deep or too much."""


class _CheckBudget(threading.local):
    left = math.inf


_check_budget = _CheckBudget()


def argument_errors(tool: str, validator: Draft202012Validator, arguments: Any) -> Iterator[ValidationError]:
    """Validation errors of `arguments` for `tool`. Raises `ValidationLimitError` if validation takes too long, and
    `ConfigError` if the schema refers to something that is not there."""
    _check_budget.left = MAX_KEYWORD_CHECKS
    try:
        yield from validator.iter_errors(arguments)
    except RecursionError:
        raise ValidationLimitError("nested too deeply") from None
    except Exception as error:
        from referencing.exceptions import Unresolvable  # only on errors: the import statement has a cost

        if not isinstance(error, Unresolvable | ValueError):  # ValueError: the $ref is not a URI
            raise
        raise ConfigError(f"tool {tool}: its schema has a $ref that cannot be resolved: {error}") from error
    finally:
        _check_budget.left = math.inf


# Keyed by the schema's text, not by its identity: tasks with equal schemas share a validator, and a schema that is
# changed in place gets a new one.
@lru_cache(maxsize=1024)
def compile_parameters(tool: str, parameters: str) -> Draft202012Validator:
    """The validator of `tool`'s parameters, given as JSON text."""
    from jsonschema import Draft202012Validator, SchemaError
    from referencing import Registry

    schema = json.loads(parameters)
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise ConfigError(f"tool {tool}: its parameters are not a valid JSON schema: {error.message:.200}") from error
    except RecursionError:
        raise ConfigError(f"tool {tool}: its parameters are nested too deeply; use fewer levels") from None
    _check_patterns(tool, schema)
    # JSON schema allows undeclared properties; in a call, an argument that the tool does not have is a mistake.
    if isinstance(schema, dict) and schema.get("properties") and not schema.keys() & _OPEN_PROPERTY_KEYWORDS:
        schema.setdefault("additionalProperties", False)
    # An empty registry: a $ref must never fetch something from the network.
    validator: Draft202012Validator = _linear_validator()(schema, registry=Registry())
    return validator


def _check_patterns(tool: str, schema: Any) -> None:
    """Reject patterns that cannot be matched in linear time."""
    keywords = list(_keywords(schema))
    for keyword, value in keywords:
        for pattern in {"patternProperties": value, "pattern": [value]}.get(keyword, ()):
            try:
                compile_pattern(pattern)
            except PatternError as fault:
                raise ConfigError(f"tool {tool}: {keyword} {pattern!r:.80} in its parameters: {fault}") from None
    if {keyword for keyword, _ in keywords} >= {"unevaluatedProperties", "patternProperties"}:
        raise ConfigError(
            f"tool {tool}: its parameters combine unevaluatedProperties and patternProperties, which is not supported; "
            "use additionalProperties"
        )


_SCHEMA_MAP_KEYWORDS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_NON_SCHEMA_KEYWORDS = {"enum", "const", "default", "examples", "required"}


def _keywords(schema: Any) -> Iterator[tuple[str, Any]]:
    """Every keyword of a schema and its subschemas; property names are not keywords."""
    stack = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            stack += node
        elif isinstance(node, dict):
            for keyword, value in node.items():
                if keyword not in _NON_SCHEMA_KEYWORDS:
                    yield keyword, value
                    named = keyword in _SCHEMA_MAP_KEYWORDS and isinstance(value, dict)
                    stack += value.values() if named else [value]


@cache
def _linear_validator() -> Any:
    """The standard validator, with linear-time versions of keywords that may take longer in `jsonschema`.

    These are patterns, which Python's engine matches by backtracking, and `uniqueItems`, which compares all pairs. All
    checks are counted: see `argument_errors`.
    """
    from jsonschema import Draft202012Validator, ValidationError
    from jsonschema.validators import extend

    def pattern(validator: Any, wanted: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
        if isinstance(instance, str) and not compile_pattern(wanted).search(instance):
            yield ValidationError(f"{instance!r:.80} does not match {wanted!r}")

    def pattern_properties(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        for key, value in instance.items() if isinstance(instance, dict) else ():
            for expression, inner in wanted.items():
                if compile_pattern(expression).search(key):
                    yield from validator.descend(value, inner, path=key, schema_path=expression)

    standard = Draft202012Validator.VALIDATORS

    def additional_properties(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        if not isinstance(instance, dict) or "patternProperties" not in schema:
            rest, plain = instance, schema
        else:
            patterns = [compile_pattern(expression) for expression in schema["patternProperties"]]
            rest = {k: v for k, v in instance.items() if not any(expression.search(k) for expression in patterns)}
            plain = {key: value for key, value in schema.items() if key != "patternProperties"}
        yield from standard["additionalProperties"](validator, wanted, rest, plain)

    def unique_items(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        if wanted and isinstance(instance, list) and len(set(map(_canonical, instance))) < len(instance):
            yield ValidationError(f"{instance!r:.80} has non-unique elements")

    def multiple_of(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        try:
            yield from standard["multipleOf"](validator, wanted, instance, schema) or ()
        except (OverflowError, ValueError):  # too large for a float, or NaN
            yield ValidationError(f"{instance!r:.80} is not a multiple of {wanted}")

    checks = {
        **standard,
        "pattern": pattern,
        "patternProperties": pattern_properties,
        "additionalProperties": additional_properties,
        "uniqueItems": unique_items,
        "multipleOf": multiple_of,
    }
    return extend(Draft202012Validator, {keyword: _with_check_budget(check) for keyword, check in checks.items()})


def _with_check_budget(check: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(check)
    def counted(validator: Any, wanted: Any, instance: Any, schema: Any) -> Any:
        _check_budget.left -= 1
        if _check_budget.left < 0:
            raise ValidationLimitError("too much to check")
        return check(validator, wanted, instance, schema)

    return counted


def _canonical(value: Any) -> str:
    """Equal texts for values that are equal in JSON: 1 and 1.0, but not 1 and true."""
    return json.dumps(_normalize_numbers(value), sort_keys=True)


def _normalize_numbers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _normalize_numbers(inner) for key, inner in value.items()}
    return [_normalize_numbers(inner) for inner in value] if isinstance(value, list) else value
