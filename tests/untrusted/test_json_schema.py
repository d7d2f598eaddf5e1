"""Compiled tool parameters, which validate arguments."""

from __future__ import annotations

import json
import time

import pytest

from toolwise.errors import ConfigError
from toolwise.untrusted.json_schema import ValidationLimitError, argument_errors, compile_parameters


def fits(schema: object, arguments: object) -> bool:
    return compile_parameters("t", json.dumps(schema)).is_valid(arguments)


def test_an_argument_that_the_tool_lacks_is_a_mistake() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert fits(schema, {"a": 1})
    assert not fits(schema, {"a": 1, "b": 2})


@pytest.mark.parametrize("open_schema", [{}, {"type": "object", "properties": {}}, True])
def test_a_schema_that_names_no_properties_stays_open(open_schema: object) -> None:
    assert fits(open_schema, {"b": 2})


def test_an_invalid_schema_names_the_tool() -> None:
    with pytest.raises(ConfigError, match="tool t: its parameters are not a valid JSON schema"):
        compile_parameters("t", json.dumps({"type": "nonsense"}))


def test_equal_schemas_share_a_validator() -> None:
    text = json.dumps({"type": "object"})
    assert compile_parameters("t", text) is compile_parameters("t", text)


def with_pattern(**keywords: object) -> dict[str, object]:
    return {"type": "object", "properties": {"a": {"type": "string", **keywords}}}


def test_patterns_are_searched() -> None:
    assert fits(with_pattern(pattern="^[a-z]+$"), {"a": "abc"})
    assert not fits(with_pattern(pattern="^[a-z]+$"), {"a": "a1"})
    named = {"type": "object", "patternProperties": {"^x_": {"type": "integer"}}, "additionalProperties": False}
    assert fits(named, {"x_1": 1})
    assert not fits(named, {"x_1": "1"})
    assert not fits(named, {"y": 1})


@pytest.mark.parametrize(
    "schema",
    [
        with_pattern(pattern="^(a+)+$"),
        {"type": "object", "patternProperties": {"^(a+)+$": {}}},
        {"type": "object", "patternProperties": {"^(a+)+$": {}}, "additionalProperties": False},
        {"type": "object", "propertyNames": {"pattern": "^(a+)+$"}},
        {"type": "object", "properties": {"a": {"anyOf": [{"pattern": "^(.*a){30}$"}, {"type": "integer"}]}}},
    ],
)
def test_no_argument_freezes_a_pattern(schema: object) -> None:
    """Python's engine would take 2**50,000 steps."""
    bad = "a" * 50_000 + "!"
    began = time.process_time()
    fits(schema, {"a": bad, bad: 1})
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "keyword", [{"pattern": "(?=a)b"}, {"pattern": r"(a)\1"}, {"items": {"patternProperties": {"(?!x)": {}}}}]
)
def test_a_pattern_beyond_linear_time_is_refused(keyword: dict[str, object]) -> None:
    with pytest.raises(
        ConfigError, match=r"tool t: .* cannot be matched in linear time; rewrite the pattern without it"
    ):
        compile_parameters("t", json.dumps(with_pattern(**keyword)))


def test_a_property_named_pattern_is_not_a_pattern() -> None:
    schema = {"type": "object", "properties": {"pattern": {"type": "string"}, "patternProperties": {"enum": ["(?=a)"]}}}
    assert fits(schema, {"pattern": "("})


def test_unique_items_take_linear_time() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    assert not fits(schema, {"a": [{"b": 1}, {"b": 1.0}]})
    assert fits(schema, {"a": [1, True, "1", None, [1], {"b": 1}, {"b": True}]})
    began = time.process_time()
    assert fits(schema, {"a": [{"b": n} for n in range(20_000)]})
    assert time.process_time() - began < 5


TWICE: dict[str, object] = {
    **{f"a{level}": {"allOf": [{"$ref": f"#/$defs/a{level + 1}"}] * 2} for level in range(40)},
    "a40": {"type": "integer"},
}


def test_a_schema_of_a_trillion_checks_takes_a_moment() -> None:
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/a0"}}, "$defs": TWICE}
    began = time.process_time()
    with pytest.raises(ValidationLimitError):
        list(argument_errors("t", compile_parameters("t", json.dumps(schema)), {"x": 1}))
    assert time.process_time() - began < 5
    assert fits({"type": "object", "properties": {"x": {"type": "integer"}}}, {"x": 1})


@pytest.mark.parametrize("value", [10**400, -(10**400), float("nan"), float("inf")])
def test_numbers_beyond_a_float_are_no_multiples(value: float) -> None:
    assert not fits({"type": "object", "properties": {"x": {"multipleOf": 0.1}}}, {"x": value})


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    schema: dict[str, object] = {"type": "object"}
    for _ in range(250):
        schema = {"type": "object", "properties": {"x": schema}}
    with pytest.raises(ConfigError, match="nested too deeply"):
        compile_parameters("t", json.dumps(schema))
