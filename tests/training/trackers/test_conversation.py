"""Stored rollouts as displayable turns."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from toolwise.training.trackers.conversation import clean_text, conversation_turns, shorten


def test_turns_name_the_tool_of_a_result_and_count_actions() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "lookup", "arguments": '{"name": "Tarn"}'}}
    messages = [
        {"role": "system", "content": "secret system prompt"},
        {"role": "user", "content": "How high is Tarn?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "height 1,204 m"},
        {"role": "assistant", "content": "1,204 m"},
    ]
    turns = conversation_turns(messages)
    assert [(t.kind, t.name, t.assistant_index) for t in turns] == [
        ("system", "", None),
        ("user", "", None),
        ("call", "lookup", 0),
        ("result", "lookup", None),
        ("assistant", "", 1),
    ]


def test_arguments_that_are_no_json_are_shown_as_they_were_written() -> None:
    call = {"id": "c", "function": {"name": "add", "arguments": "{oops"}}
    assert conversation_turns([{"role": "assistant", "tool_calls": [call]}])[0].text == "add({oops)"


@given(st.text(), st.integers(12, 60))
def test_shortened_text_fits(text: str, limit: int) -> None:
    assert len(shorten(text, limit)) <= limit


@given(st.text(st.characters(exclude_categories=())))
def test_clean_text_can_be_written(text: str) -> None:
    assert "\x1b" not in clean_text(text)
    clean_text(text).encode("utf-8")
