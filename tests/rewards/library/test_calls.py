"""Rewards for calls that match their schemas, and for expected calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolwise.errors import ConfigError, DataError
from toolwise.messages import Message, ToolCall
from toolwise.rewards.library.calls import (
    ExpectedCall,
    actual_calls,
    call_match_reward,
    match_in_any_order,
    schema_reward,
)

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "…",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
            "required": ["city"],
        },
    },
}
NOW = {"name": "now"}


def did(*calls: ToolCall, content: str = "") -> list[Message]:
    return [
        Message(role="user", content="?"),
        Message(role="assistant", content=content, tool_calls=list(calls) or None),
    ]


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (call("weather", city="Oslo"), None),
        (call("weather", city="Oslo", days=2), None),
        (call("now"), None),
        (call("weather"), "weather: 'city' is a required property"),
        (call("weather", city=1), "weather: 1 is not of type 'string'"),
        (call("weather", city="Oslo", days=0), "weather: 0 is less than the minimum of 1"),
        (call("weather", city="Oslo", when="now"), "weather: Additional properties are not allowed"),
        (call("forecast", city="Oslo"), "there is no tool 'forecast'"),
        (ToolCall(name="weather", arguments="{city"), "weather: its arguments are not a JSON object"),
        (ToolCall(name="", arguments="rubbish"), "a call: its arguments are not a JSON object"),
    ],
)
def test_one_call_against_its_schema(made: ToolCall, problem: str | None) -> None:
    result = schema_reward(did(made), None, tool_schemas=[WEATHER, NOW])
    assert result.score == float(problem is None)
    assert problem is None or (result.reason or "").startswith(problem)


def test_the_share_of_calls_that_fit() -> None:
    messages = [*did(call("weather", city="Oslo"), call("weather")), *did(call("now"), call("nowhere"))]
    result = schema_reward(messages, None, tool_schemas=json.dumps([WEATHER, NOW]))
    assert result.score == 0.5
    assert {name: metric.score for name, metric in result.metrics.items()} == {"calls": 4, "invalid_calls": 2}


def test_without_calls_the_score_is_what_was_asked_for() -> None:
    assert schema_reward(did(), None, tool_schemas=[NOW]).score == 1
    assert schema_reward(did(), None, tool_schemas=[NOW], no_calls_score=0.25).score == 0.25


def test_calls_in_the_text_are_checked_too() -> None:
    text = '<think>x</think>\n<tool_call>\n{"name": "weather", "parameters": {"city": "Oslo"}}\noops\n</tool_call>'
    assert schema_reward(did(content=text), None, tool_schemas=[WEATHER]).score == 0.5


def test_a_reference_to_elsewhere_fetches_nothing() -> None:
    tool = {"name": "f", "parameters": {"$ref": "http://127.0.0.1:9/schema.json"}}
    with pytest.raises(ConfigError, match=r"cannot be resolved.*127\.0\.0\.1:9"):
        schema_reward(did(call("f")), None, tool_schemas=[tool])


@pytest.mark.parametrize(
    "schemas",
    [None, [], "not json", "{}", [1], [{"parameters": {}}], [{"name": "f", "parameters": {"type": "nothing"}}]],
)
def test_schemas_that_are_none_are_an_error(schemas: Any) -> None:
    with pytest.raises(ConfigError, match="tool_schemas"):
        schema_reward(did(call("f")), None, tool_schemas=schemas)


# Expected calls

TRUTH = [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "parameters": {"b": "x"}}]


@pytest.mark.parametrize(
    ("made", "options", "score"),
    [
        ([call("f", a=1), call("g", b="x")], {}, 1),
        ([call("g", b="x"), call("f", a=1)], {}, 1),
        ([call("g", b="x"), call("f", a=1)], {"ordered": True}, 0),
        ([call("f", a=1), call("g", b="x")], {"ordered": True}, 1),
        ([call("f", a=1)], {}, 0),
        ([call("f", a=1)], {"partial": True}, 0.5),
        ([call("f", a=1), call("g", b="x"), call("f", a=1)], {}, 0),
        ([call("f", a=1), call("g", b="x"), call("f", a=1), call("h")], {"partial": True}, 0.5),
        ([call("f", a=1), call("g", b="X ")], {}, 0),
        ([call("f", a=1), call("g", b="X ")], {"loose_strings": True}, 1),
        ([], {"partial": True}, 0),
    ],
)
def test_the_wanted_calls(made: list[ToolCall], options: dict[str, bool], score: float) -> None:
    assert call_match_reward(did(*made), TRUTH, **options).score == score


def test_where_no_call_is_wanted_none_is_right() -> None:
    assert call_match_reward(did(content="I cannot do that."), []).score == 1
    assert call_match_reward(did(call("f")), []).score == 0
    assert call_match_reward(did(content="f(a=1)"), []).score == 0


def test_calls_written_as_python() -> None:
    assert call_match_reward(did(content="<think>f(a=2)?</think> [f(a=1), g(b='x')]"), TRUTH).score == 1
    assert call_match_reward(did(content="```python\nf(a=1)\ng(b='x')\n```"), TRUTH).score == 1
    assert call_match_reward(did(content="I would call f(a=1)"), TRUTH, partial=True).score == 0


def test_calls_made_over_several_turns_count_together() -> None:
    tool = Message(role="tool", content="ok")
    messages = [*did(call("f", a=1)), tool, did(call("g", b="x"))[1], tool, Message(role="assistant", content="done")]
    assert call_match_reward(messages, TRUTH).score == 1
    assert actual_calls(messages[:1]) == []


def test_possible_answers_as_bfcl_writes_them() -> None:
    truth = [{"weather": {"city": ["Oslo", "Oslo, Norway"], "days": ["", 1]}}]
    assert call_match_reward(did(call("weather", city="Oslo, Norway")), truth).score == 1
    assert call_match_reward(did(call("weather", city="Oslo", days=1)), truth).score == 1
    assert call_match_reward(did(call("weather", city="Oslo", days=2)), truth).score == 0
    assert call_match_reward(did(call("weather", days=1)), truth).score == 0


def test_a_call_that_fits_two_is_left_to_the_one_that_needs_it() -> None:
    either, one = ExpectedCall("f", {"a": [1, 2]}), ExpectedCall("f", {"a": [1]})
    made = [call("f", a=1), call("f", a=2)]
    assert match_in_any_order([either, one], made, lambda expected, c: expected.matches(c)) == 2


def test_a_bad_ground_truth_is_an_error() -> None:
    with pytest.raises(DataError, match="ground truth"):
        call_match_reward(did(call("f")), None)


arguments = st.dictionaries(st.sampled_from("abc"), st.integers(0, 2) | st.text("xé", max_size=2), max_size=3)
call_lists = st.lists(
    st.builds(lambda n, a: ToolCall(name=n, arguments=a), st.sampled_from("fg"), arguments), max_size=5
)


@settings(deadline=None)
@given(call_lists, st.data())
def test_the_wanted_calls_in_any_order_are_right(made: list[ToolCall], data: st.DataObject) -> None:
    truth = [{"name": c.name, "arguments": c.arguments} for c in made]
    assert call_match_reward(did(*data.draw(st.permutations(made))), truth).score == 1


@settings(deadline=None)
@given(call_lists, call_lists)
def test_a_share_is_a_share(made: list[ToolCall], wanted: list[ToolCall]) -> None:
    truth = [{"name": c.name, "arguments": c.arguments} for c in wanted]
    share = call_match_reward(did(*made), truth, partial=True).score
    in_order = call_match_reward(did(*made), truth, partial=True, ordered=True).score
    assert share is not None
    assert in_order is not None
    assert 0 <= in_order <= share <= 1
