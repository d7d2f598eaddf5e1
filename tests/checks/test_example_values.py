"""Generated values: examples fit their schema, bad arguments and nonsense do not."""

from __future__ import annotations

import json
from random import Random
from typing import Any, Literal

import pytest

from toolwise.checks.example_values import (
    ODD_TEXTS,
    bad_arguments,
    example_calls,
    example_value,
    nonsense_calls,
    odd_arguments,
)
from toolwise.tools import build_tools, tool
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


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": "string", "minLength": 12},
        {"type": "string", "maxLength": 1},
        {"type": "integer", "minimum": 5},
        {"type": "integer", "minimum": -3, "maximum": -3},
        {"type": "number", "exclusiveMinimum": 2},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["a", 3]},
        {"const": {"x": 1}},
        {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        {"type": ["string", "null"]},
        {"type": "array", "items": {"type": "integer"}, "minItems": 2},
        {"properties": {"a": {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}}},
        {"type": "object"},
    ],
    ids=json.dumps,
)
def test_an_example_fits_its_schema(schema: dict[str, Any]) -> None:
    from jsonschema import Draft202012Validator

    for seed in range(20):
        assert list(Draft202012Validator(schema).iter_errors(example_value(schema, Random(seed)))) == []


def test_example_calls_fit_real_tools() -> None:
    @tool(isolate=False)
    def book(city: str, nights: int, board: Literal["full", "half"] = "half", tags: list[str] | None = None) -> str:
        """Books."""
        return city

    tools = {**build_tools(["calculator", "search"]), "book": book}
    specs = [made.get_openai_tool_schema().model_dump() for made in tools.values()]
    calls = example_calls(specs, Random(0))
    assert {call["name"] for call in calls} == set(tools)
    for call in calls:
        assert validate_arguments(tools[call["name"]].get_openai_tool_schema(), call["arguments"]) == []


def test_nonsense_fits_nothing() -> None:
    schema = build_tools(["calculator"])["calculator"].get_openai_tool_schema()
    for call in nonsense_calls([schema.model_dump()]):
        assert call["name"] != "calculator" or validate_arguments(schema, call["arguments"])
    assert nonsense_calls([])
