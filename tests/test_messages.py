"""Messages in OpenAI's chat format, and `Prefix`, by which a rollout's histories share one list."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from toolwise.messages import Message, Prefix, ToolCall, as_messages, parse_arguments

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))


def is_no_object(text: str) -> bool:
    return text != "" and isinstance(parse_arguments(text), str)


calls = st.builds(
    ToolCall,
    name=texts,
    arguments=st.dictionaries(texts, values, max_size=3) | texts.filter(is_no_object),
    id=texts,
)
messages = st.builds(
    Message,
    role=st.sampled_from(["system", "developer", "user", "assistant", "tool"]),
    content=st.none() | texts,
    tool_calls=st.none() | st.lists(calls, min_size=1, max_size=3),
    tool_call_id=st.none() | texts,
    name=st.none() | texts,
)


def openai_call(arguments: Any) -> dict[str, Any]:
    return {"id": "call_7", "type": "function", "function": {"name": "add", "arguments": arguments}}


def test_an_openai_call_is_read() -> None:
    call = ToolCall.model_validate(openai_call('{"a": 1, "b": [2]}'))
    assert (call.id, call.name, call.arguments) == ("call_7", "add", {"a": 1, "b": [2]})


def test_an_openai_call_is_written_with_its_arguments_as_a_string() -> None:
    assert ToolCall(id="call_7", name="add", arguments={"word": "né"}).to_openai() == openai_call('{"word": "né"}')


@pytest.mark.parametrize(
    "text", ['{"a": 1', "[1, 2]", '"a"', "null", "3", "not json", '{"a": ' * 5000, '{"a": ' + "9" * 5000]
)
def test_arguments_that_are_not_an_object_are_kept_unchanged(text: str) -> None:
    call = ToolCall.model_validate(openai_call(text))
    assert call.arguments == text
    assert call.to_openai()["function"]["arguments"] == text


@pytest.mark.parametrize("nothing", [None, "", {}])
def test_no_arguments_are_an_empty_object(nothing: Any) -> None:
    assert ToolCall.model_validate(openai_call(nothing)).arguments == {}


def test_arguments_may_come_as_an_object() -> None:
    assert ToolCall.model_validate(openai_call({"a": 1})).arguments == {"a": 1}


def test_a_call_without_a_function_object_is_refused() -> None:
    with pytest.raises(ValidationError, match="must be an object with name and arguments"):
        ToolCall.model_validate({"id": "x", "function": "add"})


def test_a_call_with_unknown_keys_is_rejected() -> None:
    with pytest.raises(ValidationError):
        ToolCall.model_validate({"name": "add", "args": {}})


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert Message.model_validate({"role": "user", "content": parts}).content == "one two"


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, "bare", {"text": "no type"}])
def test_parts_that_are_no_text_are_refused_and_not_dropped(part: Any) -> None:
    with pytest.raises(ValidationError, match="parts other than text"):
        Message.model_validate({"role": "user", "content": [{"type": "text", "text": "look: "}, part]})


def test_an_unknown_role_is_rejected() -> None:
    with pytest.raises(ValidationError):
        Message.model_validate({"role": "narrator", "content": "once"})


def test_keys_that_servers_add_are_passed_over() -> None:
    message = Message.model_validate({"role": "assistant", "content": "hi", "refusal": None, "annotations": []})
    assert message.to_openai() == {"role": "assistant", "content": "hi"}


def test_a_message_of_calls_alone_has_no_content() -> None:
    message = Message.model_validate({"role": "assistant", "content": None, "tool_calls": [openai_call("{}")]})
    assert message.content is None
    assert message.to_openai()["content"] is None


@given(messages)
def test_openai_form_and_back_gives_the_same_message(message: Message) -> None:
    assert Message.model_validate(message.to_openai()) == message


@given(messages)
def test_json_and_back_gives_the_same_message(message: Message) -> None:
    assert Message.model_validate_json(message.model_dump_json()) == message
    assert json.loads(message.model_dump_json()) == message.to_openai()


@given(st.lists(st.integers()), st.data())
def test_a_prefix_is_a_list_in_all_but_its_memory(items: list[int], data: st.DataObject) -> None:
    length = data.draw(st.integers(0, len(items)))
    prefix, plain = Prefix(items, length), items[:length]
    assert list(prefix) == plain
    assert len(prefix) == length
    assert prefix == plain
    assert plain == list(reversed(list(reversed(prefix))))
    cut = data.draw(st.slices(length))
    assert list(prefix[cut]) == plain[cut]
    for i in range(-length, length):
        assert prefix[i] == plain[i]
    for i in (-length - 1, length):
        with pytest.raises(IndexError):
            prefix[i]


def test_a_prefix_does_not_see_what_is_appended_later() -> None:
    items = ["a", "b"]
    prefix = Prefix(items)
    items.append("c")
    assert list(prefix) == ["a", "b"]
    assert "c" not in prefix
    assert prefix[-1] == "b"
    assert prefix != Prefix(items)


def test_the_beginning_of_a_prefix_is_a_prefix_of_the_same_list() -> None:
    items = list(range(9))
    beginning = Prefix(items)[:4]
    assert isinstance(beginning, Prefix)
    assert beginning._items is items


def test_a_prefix_is_no_string_and_has_no_hash() -> None:
    assert Prefix(["a", "b"]) != "ab"
    with pytest.raises(TypeError):
        hash(Prefix(["a"]))


def test_prefixes_of_one_list_still_share_it_after_pickling() -> None:
    items = list(range(1000, 2000))
    short, long = pickle.loads(pickle.dumps([Prefix(items, 3), Prefix(items, 1000)]))
    assert short == [1000, 1001, 1002]
    assert short._items is long._items


def test_reasoning_is_kept_apart_and_written_back() -> None:
    given = {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}
    message = Message.model_validate(given)
    assert message.to_openai() == given
    assert Message.unchecked("assistant", "4", reasoning_content="2 and 2") == message
    assert "reasoning_content" not in Message(role="assistant", content="4").to_openai()


def test_as_messages_copies_no_prefix_and_reads_dictionaries() -> None:
    shared = Prefix([Message(role="user", content="hi")])
    assert as_messages(shared) is shared
    assert as_messages([{"role": "user", "content": "hi"}]) == list(shared)


@pytest.mark.parametrize("wrong", ["hello", 3, None])
def test_as_messages_refuses_what_is_no_list(wrong: Any) -> None:
    with pytest.raises(ValueError, match="expected a list of messages"):
        as_messages(wrong)


# Reading messages as mappings, as with OpenAI's dictionaries.


def with_call() -> Message:
    call = ToolCall(id="call_7", name="add", arguments={"a": 1})
    return Message(role="assistant", content=None, tool_calls=[call])


def test_a_message_reads_as_the_dictionary_that_it_stands_for() -> None:
    message = Message(role="user", content="hi")
    assert message["content"] == "hi" == message.get("content")
    assert message["role"] == "user"
    assert dict(message) == {**message} == {"role": "user", "content": "hi"} == message.to_openai()
    assert "content" in message
    assert "tool_calls" not in message
    assert message.get("tool_calls", []) == []
    assert message["tool_calls"] is None  # like the attribute


def test_a_call_reads_in_openais_nested_form_and_by_field() -> None:
    call = with_call()["tool_calls"][0]
    assert call["function"]["name"] == call["name"] == "add"
    assert json.loads(call["function"]["arguments"]) == call["arguments"] == {"a": 1}
    assert (call["id"], call["type"], call.get("function")["name"]) == ("call_7", "function", "add")
    assert dict(call) == call.to_openai()
    assert "function" in call
    assert "name" in call
    assert "missing" not in call


@pytest.mark.parametrize(
    ("key", "said"),
    [("contnet", "did you mean 'content'"), ("reward", "available: content, name, reasoning_content, role")],
)
def test_a_missing_key_says_what_there_is(key: str, said: str) -> None:
    with pytest.raises(KeyError, match=f"a Message has no '{key}'; {said}"):
        Message(role="user", content="hi")[key]
    assert Message(role="user", content="hi").get(key) is None


def test_a_missing_key_of_a_call_says_so_too() -> None:
    call = with_call()["tool_calls"][0]
    with pytest.raises(KeyError, match="did you mean 'function'"):
        call["functoin"]
    with pytest.raises(KeyError, match="did you mean 'arguments'"):
        call["function"]["argument"]


def test_messages_stay_what_they_were() -> None:
    message = with_call()
    assert Message.model_validate(message.model_dump()) == message
    assert pickle.loads(pickle.dumps(message)) == message
    assert message.model_copy(deep=True) == message
    assert Message.unchecked("user", "hi")["content"] == "hi"


def test_a_message_is_written_like_a_dictionary_too() -> None:
    message = Message(role="user", content="hi")
    message["content"] = "ho"
    assert (message.content, message["content"]) == ("ho", "ho")
    with pytest.raises(KeyError, match="did you mean 'content'"):
        message["contnet"] = "x"
