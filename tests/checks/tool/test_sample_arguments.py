"""Generated arguments: minimal ones fit the schema, bad ones do not."""

from __future__ import annotations

from typing import Any

import pytest

from toolwise.checks.example_values import example_value
from toolwise.checks.tool.sample_arguments import ODD_TEXTS, bad_arguments, odd_arguments
from toolwise.tools.base import FunctionSchema, OpenAIFunctionToolSchema
from toolwise.tools.schema import validate_arguments

SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {}},
    {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"type": "string", "minLength": 20}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"type": "integer", "minimum": 5}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"type": "number", "exclusiveMinimum": 5}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}, "required": ["a"]},
    {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "number"}, "minItems": 3}},
        "required": ["a"],
    },
    {
        "type": "object",
        "properties": {"a": {"type": "object", "properties": {"b": {"const": 3}}, "required": ["b"]}},
        "required": ["a"],
    },
]


def problems(parameters: dict[str, Any], arguments: dict[str, Any]) -> list[str]:
    schema = OpenAIFunctionToolSchema(function=FunctionSchema(name="t", parameters=parameters))
    return validate_arguments(schema, arguments)


@pytest.mark.parametrize("parameters", SCHEMAS)
def test_plain_arguments_fit(parameters: dict[str, Any]) -> None:
    assert problems(parameters, example_value(parameters)) == []


@pytest.mark.parametrize("parameters", SCHEMAS[1:])
def test_bad_arguments_do_not(parameters: dict[str, Any]) -> None:
    bad = list(bad_arguments(parameters, example_value(parameters)))
    assert len(bad) == 3
    assert all(problems(parameters, arguments) for arguments in bad)


def test_odd_arguments_change_one_at_a_time() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}}
    odd = list(odd_arguments(parameters, {"a": "x", "n": 1}))
    assert [arguments["a"] for arguments in odd[: len(ODD_TEXTS)]] == list(ODD_TEXTS)
    assert all(arguments["a"] == "x" for arguments in odd[len(ODD_TEXTS) :])


def test_a_schema_that_never_ends_is_given_up() -> None:
    endless: dict[str, Any] = {"type": "array"}
    endless["items"] = endless
    parameters = {"type": "object", "properties": {"a": endless}, "required": ["a"]}
    assert isinstance(example_value(parameters)["a"], list)
