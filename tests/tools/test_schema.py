"""Validating arguments: one line per problem, in a fixed order; odd schemas neither crash nor fetch."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolwise.errors import ToolwiseError
from toolwise.tools.base import FunctionSchema, OpenAIFunctionToolSchema
from toolwise.tools.schema import MAX_PROBLEM_LENGTH, MAX_PROBLEMS, _compiled_schema, validate_arguments


def schema(parameters: dict[str, Any]) -> OpenAIFunctionToolSchema:
    return OpenAIFunctionToolSchema(function=FunctionSchema(name="t", parameters=parameters))


BOOKING = schema(
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "nights": {"type": "integer", "minimum": 1},
            "board": {"type": "string", "enum": ["full", "half"]},
            "guests": {
                "type": "array",
                "items": {"type": "object", "properties": {"age": {"type": "number"}}},
            },
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["city", "nights"],
    }
)


@pytest.mark.parametrize(
    ("arguments", "problems"),
    [
        ({"city": "Oslo", "nights": 2}, []),
        ({"city": "Oslo", "nights": 2.0, "note": None}, []),
        ({}, ["missing argument 'city'", "missing argument 'nights'"]),
        ({"city": "Oslo"}, ["missing argument 'nights'"]),
        ({"city": 3, "nights": 2}, ["argument 'city' must be a string, got an integer"]),
        ({"city": "Oslo", "nights": "2"}, ["argument 'nights' must be an integer, got a string"]),
        ({"city": "Oslo", "nights": True}, ["argument 'nights' must be an integer, got a boolean"]),
        ({"city": None, "nights": 2}, ["argument 'city' must be a string, got null"]),
        ({"city": "Oslo", "nights": 0}, ["argument 'nights': 0 is less than the minimum of 1"]),
        (
            {"city": "Oslo", "nights": 1, "town": "x"},
            ["unexpected argument 'town' (expected: board, city, guests, nights, note)"],
        ),
        (
            {"city": "Oslo", "nights": 1, "board": "none"},
            ['argument \'board\' must be one of "full", "half"'],
        ),
        (
            {"city": "Oslo", "nights": 1, "guests": [{"age": 3}, {"age": "x"}]},
            ["argument 'guests[1].age' must be a number, got a string"],
        ),
        (
            {"city": "Oslo", "nights": 1, "note": []},
            ["argument 'note' must be a string or null, got an array"],
        ),
    ],
)
def test_problems_by_hand(arguments: dict[str, Any], problems: list[str]) -> None:
    assert validate_arguments(BOOKING, arguments) == problems


@pytest.mark.parametrize("arguments", ["{not json", None, 3, ["city"]])
def test_what_is_no_object_is_said_so(arguments: Any) -> None:
    assert validate_arguments(BOOKING, arguments) == ["the arguments must be a JSON object"]


def test_free_form_and_explicitly_open_schemas_take_anything() -> None:
    assert validate_arguments(schema({"type": "object", "properties": {}}), {"x": 1}) == []
    open_schema = schema({"type": "object", "properties": {"a": {}}, "additionalProperties": True})
    assert validate_arguments(open_schema, {"x": 1}) == []


def test_validation_leaves_the_schema_as_it_was() -> None:
    before = BOOKING.model_dump()
    validate_arguments(BOOKING, {"x": 1})
    assert BOOKING.model_dump() == before


def test_a_schema_changed_in_place_is_seen() -> None:
    changing = schema({"type": "object", "properties": {"a": {"type": "string"}}})
    assert validate_arguments(changing, {"a": 1}) != []
    changing.function.parameters["properties"]["a"]["type"] = "integer"
    assert validate_arguments(changing, {"a": 1}) == []


def test_local_references_work() -> None:
    local = schema({"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}})
    assert validate_arguments(local, {"a": 1}) == []
    assert validate_arguments(local, {"a": "x"}) == ["argument 'a' must be an integer, got a string"]


def test_a_remote_reference_is_an_error_and_never_fetched() -> None:
    remote = schema({"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/schema.json"}}})
    with pytest.raises(ToolwiseError, match=r"tool t: its schema has a \$ref that cannot be resolved"):
        validate_arguments(remote, {"a": 1})


def test_a_schema_that_is_none_names_its_tool() -> None:
    with pytest.raises(ToolwiseError, match="tool t: its parameters are not a valid JSON schema"):
        validate_arguments(schema({"type": "objekt"}), {})


def test_messages_are_few_short_and_one_line() -> None:
    pattern = schema({"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}})
    (problem,) = validate_arguments(pattern, {"a": "long\n" * 1_000})
    assert len(problem) <= MAX_PROBLEM_LENGTH
    assert "\n" not in problem
    assert len(validate_arguments(pattern, {f"x{i}": 1 for i in range(50)})) == MAX_PROBLEMS


def test_arguments_nested_beyond_the_stack_are_a_problem_not_a_crash() -> None:
    endless = schema({"type": "object", "properties": {"a": {"$ref": "#"}}})
    deep: dict[str, Any] = {}
    for _ in range(5_000):
        deep = {"a": deep}
    assert validate_arguments(endless, deep) == ["the arguments are nested too deeply"]


simple = st.sampled_from(["string", "boolean", "integer", "number", "null"])
values = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.just([]), st.just({}))


@given(
    st.dictionaries(st.sampled_from("abcd"), simple, max_size=4),
    st.lists(st.sampled_from("abcd"), unique=True, max_size=3),
    st.dictionaries(st.sampled_from("abcde"), values, max_size=4),
)
def test_the_short_way_never_passes_what_the_validator_would_not(
    kinds: dict[str, str], required: list[str], arguments: dict[str, Any]
) -> None:
    parameters = {
        "type": "object",
        "properties": {name: {"type": kind, "description": "x"} for name, kind in kinds.items()},
        "required": required,
    }
    function = FunctionSchema(name="t", parameters=parameters)
    checks = _compiled_schema(function)
    assert checks.types is not None
    if checks.passes_fast_check(arguments):
        assert list(checks.validator.iter_errors(arguments)) == []


def test_a_schema_that_asks_for_more_than_types_goes_to_the_validator() -> None:
    for more in ({"enum": ["a"]}, {"minLength": 3}, {"pattern": "x"}, {"$ref": "#/x"}):
        parameters = {"type": "object", "properties": {"a": {"type": "string", **more}}}
        assert _compiled_schema(FunctionSchema(name="t", parameters=parameters)).types is None
    assert _compiled_schema(FunctionSchema(name="t", parameters={"type": "object", "maxProperties": 1})).types is None
