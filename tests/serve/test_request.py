"""Requests: what is supported, and what is rejected rather than ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest

from toolwise.serve.limits import chars_of
from toolwise.serve.request import MAX_CHOICES, BadRequestError, ChatRequest, read_request

HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def read(**more: Any) -> ChatRequest:
    return read_request(json.dumps(HELLO | more).encode())


def refused(raw: bytes) -> BadRequestError:
    with pytest.raises(BadRequestError) as caught:
        read_request(raw)
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_plain_request() -> None:
    request = read()
    assert (request.model, request.messages[0].content, request.n) == ("m", "hello", 1)


def test_what_has_no_effect_here_is_let_through() -> None:
    assert read(user="u", metadata={"a": 1}, parallel_tool_calls=False, temperature=None, stop=None).temperature is None


def test_fields_of_a_tool_that_only_a_template_knows_are_kept() -> None:
    request = read(tools=[{"type": "function", "function": {"name": "f", "strict": True}, "more": 1}])
    assert request.tools is not None
    dumped = request.tools[0].model_dump(exclude_none=True)
    assert dumped["function"]["strict"] is True
    assert dumped["more"] == 1
    assert dumped["function"]["parameters"] == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        ('{"a": 1}', {"a": 1}),
        ("{half", "{half"),
        (json.dumps('{"half'), '{"half'),
        ('"never closed', '"never closed'),
        ("", {}),
    ],
)
def test_arguments_mean_what_the_model_wrote(sent: str, meant: Any) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": sent}}
    request = read(messages=[{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert request.messages[0].tool_calls is not None
    assert request.messages[0].tool_calls[0].arguments == meant


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_p", 0.05),
        ("frequency_penalty", 1),
        ("presence_penalty", -1),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"5": 1}),
    ],
)
def test_what_would_reshape_the_answer_is_refused_by_name(name: str, value: Any) -> None:
    fault = refused(json.dumps(HELLO | {name: value}).encode())
    assert (fault.param, fault.code, fault.status) == (name, "unsupported_parameter", 400)


def test_what_would_reshape_it_may_be_given_its_neutral_value() -> None:
    read(top_p=1.0, top_k=-1, min_p=0.0, frequency_penalty=0, repetition_penalty=1, stop=[], top_logprobs=0)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0"),
        ({"model": None}, "model"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": MAX_CHOICES + 1}, "n"),
        ({"seed": 2**70}, "seed"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "response_format"),
        ({"budget": -1}, "budget"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], param: str) -> None:
    fault = refused(json.dumps(HELLO | change).encode())
    assert fault.param == param
    assert str(fault).startswith(param)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"model": "\\ud800"}'])
def test_a_body_that_is_no_request(raw: bytes) -> None:
    assert refused(raw).status == 400


def test_options_of_a_reply() -> None:
    request = read(stop="\n", response_format={"type": "json_object"}, top_k=-1, tool_choice="auto")
    assert (request.stop, request.response_format) == (["\n"], {"type": "object"})
    assert request.changed_options() == ["stop", "response_format"]
    assert read(stop=[""], response_format={"type": "text"}, top_p=1, top_k=0).changed_options() == []


def test_a_tool_may_be_named() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    choice = read(tools=tools, tool_choice={"type": "function", "function": {"name": "f"}}).tool_choice
    assert choice.name == "f"


def test_names_close_to_a_limit_on_cost_are_refused_and_others_ignored() -> None:
    for name, meant in ("max_cots", "max_cost"), ("bugdet", "budget"), ("routes", "route"):
        with pytest.raises(BadRequestError, match=f"did you mean '{meant}'"):
            read_request(json.dumps(HELLO | {name: 1}).encode())
    harmless = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "modalities")
    read_request(json.dumps(HELLO | dict.fromkeys(harmless, "x")).encode())


@pytest.mark.parametrize("name", ["extra_body", "toolwise"])
def test_limits_on_cost_in_a_wrapper_are_refused(name: str) -> None:
    with pytest.raises(BadRequestError, match=f"{name}.budget is not an option: give budget as a field of the request"):
        read_request(json.dumps(HELLO | {name: {"seed": 1, "budget": 0.2}}).encode())
    for harmless in ({"trace": 1}, "x", ["budget"], None):
        read_request(json.dumps(HELLO | {name: harmless}).encode())


def test_the_length_of_a_conversation_counts_everything_that_a_template_may_show() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": [7] * 1_000})}}
    said = {"role": "assistant", "content": None, "reasoning_content": "x" * 50, "tool_calls": [call]}
    assert (
        chars_of(read(messages=[{"role": "user", "content": "four"}, said]).messages) == 4 + 50 + 1 + 1 + 1 + 1 + 1_000
    )
