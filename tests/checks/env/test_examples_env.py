"""Test actions for environments: valid and invalid ones."""

from __future__ import annotations

import json
from random import Random
from typing import Any, Literal

import pytest

from toolwise.checks.env.sample_actions import example_calls, nonsense_calls
from toolwise.checks.example_values import example_value
from toolwise.tools import build_tools, tool, validate_arguments


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
