"""Chat completions of different servers, valid and broken."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolwise.policies.openai.reply import Reply, read_reply
from toolwise.remote.server_errors import ServerError
from toolwise.rollout.parsers import PARSERS

CALL = {"id": "abc", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
VLLM_IDS = {
    "token_ids": [7, 8],
    "logprobs": {"content": [{"token": "a", "logprob": -1.0}, {"token": "b", "logprob": 0}]},
}


def body(choice: dict[str, Any] | None = None, /, *, message: Any = None, **top: Any) -> dict[str, Any]:
    told = {"role": "assistant", "content": "hello"} if message is None else message
    return {"choices": [{"index": 0, "message": told, "finish_reason": "stop", **(choice or {})}], **top}


def read(value: Any, parser: str | None = None, **headers: str) -> Reply:
    return read_reply(value, headers, PARSERS[parser] if parser else None)


def fault_of(value: Any) -> ServerError:
    with pytest.raises(ServerError) as caught:
        read(value)
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_server_may_name_the_string_that_ended_a_reply() -> None:
    assert read(body({"stop_reason": "</answer>"})).tokens.finish_reason == "stop_string"
    assert read(body({"stop_reason": 2})).tokens.finish_reason == "stop"  # a token
    assert read(body({"stop_reason": None})).tokens.finish_reason == "stop"


def test_plain_text() -> None:
    reply = read(body())
    assert (reply.content, reply.raw, reply.calls) == ("hello", "hello", [])
    assert reply.tokens == {
        "tokens": [],
        "token_logprobs": reply.tokens["token_logprobs"],
        "finish_reason": "stop",
        "policy_version": 0,
    }


@pytest.mark.parametrize("per_choice", [False, True], ids=["as vLLM", "as SGLang"])
def test_token_ids_make_token_logprobs(per_choice: bool) -> None:
    prompt = {"prompt_token_ids": [1, 2, 3]}
    reply = read(body(VLLM_IDS | prompt) if per_choice else body(VLLM_IDS, **prompt))
    assert {key: value if isinstance(value, str | int) else list(value) for key, value in reply.tokens.items()} == {
        "token_ids": [7, 8],
        "logprobs": [-1.0, 0.0],
        "prompt_ids": [1, 2, 3],
        "finish_reason": "stop",
        "policy_version": 0,
    }


def test_ids_in_the_place_of_token_texts() -> None:
    content = [{"token": "token_id:7", "logprob": -1.0}, {"token": "token_id:80", "logprob": -2.0}]
    reply = read(body({"logprobs": {"content": content}}, prompt_token_ids=[1]))
    assert list(reply.tokens["token_ids"]) == [7, 80]


@pytest.mark.parametrize("lacking", ["token_ids", "logprobs", "prompt_token_ids"])
def test_with_anything_lacking_there_are_no_token_logprobs(lacking: str) -> None:
    value = body(VLLM_IDS, prompt_token_ids=[1])
    value.pop(lacking, None)
    value["choices"][0].pop(lacking, None)
    reply = read(value)
    assert "token_ids" not in reply.tokens
    assert reply.tokens["finish_reason"] == "stop"
    if lacking != "logprobs":
        assert reply.tokens["tokens"] == ["a", "b"]


def test_without_ids_the_servers_own_counts_are_the_numbers_of_tokens() -> None:
    usage = {"prompt_tokens": 40, "completion_tokens": 3}
    told = read(body(usage=usage)).tokens
    assert (told.prompt_count, told.sampled_count) == (40, 3)
    counted = read(body(VLLM_IDS, prompt_token_ids=[1, 2, 3], usage=usage)).tokens
    assert (counted.prompt_count, counted.sampled_count) == (3, 2)


@pytest.mark.parametrize("usage", [None, 3, {"prompt_tokens": -1, "completion_tokens": True}, {"prompt_tokens": "9"}])
def test_counts_that_are_none_are_zero(usage: Any) -> None:
    tokens = read(body(usage=usage)).tokens
    assert (tokens.prompt_count, tokens.sampled_count) == (0, 0)


def test_native_tool_calls() -> None:
    nameless = {"type": "function", "function": {"name": "sub", "arguments": "not JSON"}}
    reply = read(body({"finish_reason": "stop"}, message={"content": None, "tool_calls": [CALL, nameless]}))
    assert [(c.id, c.name, c.arguments) for c in reply.calls] == [
        ("abc", "add", {"a": 1}),
        ("call_1", "sub", "not JSON"),
    ]
    assert reply.tokens["finish_reason"] == "tool_calls"
    assert reply.content == ""


def test_calls_in_the_text_are_found_by_a_parser() -> None:
    text = 'so <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    reply = read(body(message={"content": text}), "hermes")
    assert [(c.name, c.arguments) for c in reply.calls] == [("add", {"a": 1})]
    assert (reply.content, reply.raw) == ("so", text)
    assert read(body(message={"content": text})).calls == []


def test_calls_that_the_server_found_although_it_was_not_asked_to() -> None:
    assert [c.name for c in read(body(message={"content": "", "tool_calls": [CALL]}), "hermes").calls] == ["add"]


@pytest.mark.parametrize(
    ("given", "read_as"),
    [("stop", "stop"), ("length", "length"), (None, "stop"), ("eos", "stop"), ("tool_calls", "stop")],
)
def test_finish_reasons_without_calls(given: str | None, read_as: str) -> None:
    assert read(body({"finish_reason": given})).tokens["finish_reason"] == read_as


def test_a_call_cut_off_is_cut_off() -> None:
    reply = read(body({"finish_reason": "length"}, message={"content": None, "tool_calls": [CALL]}))
    assert reply.tokens["finish_reason"] == "length"


@pytest.mark.parametrize(("finish", "retryable"), [("abort", True), ("error", True), ("content_filter", False)])
def test_a_reply_that_the_server_broke_off_is_no_reply(finish: str, retryable: bool) -> None:
    assert fault_of(body({"finish_reason": finish})).retryable is retryable


def test_thoughts_that_the_server_took_out_are_in_the_raw_text() -> None:
    reply = read(body(message={"content": "4", "reasoning_content": "2 and 2"}))
    assert (reply.content, reply.raw, reply.reasoning) == ("4", "<think>2 and 2</think>4", "2 and 2")


@pytest.mark.parametrize(
    "more",
    [VLLM_IDS, {"logprobs": VLLM_IDS["logprobs"]}, {"usage": {"completion_tokens": 1}}],
    ids=["ids", "texts", "usage"],
)
def test_a_model_may_end_its_turn_at_once(more: dict[str, Any]) -> None:
    top = {key: value for key, value in more.items() if key == "usage"}
    assert read(body(more, message={"content": ""}, **top)).content == ""


def test_an_empty_reply_without_a_token_is_a_fault() -> None:
    fault = fault_of(body(message={"content": None}))
    assert (fault.kind, fault.retryable) == ("bad_reply", True)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"choices": []},
        {"choices": None},
        {"choices": [None]},
        {"choices": [{}]},
        {"choices": [{"message": "hello"}]},
        {"error": {"message": "in a 200"}},
        body(message={"content": 5}),
        body(message={"content": [{"type": "image_url"}]}),
        body(message={"tool_calls": [{"function": 5}]}),
        body(message={"tool_calls": 5}),
        body(VLLM_IDS | {"token_ids": [1]}, prompt_token_ids=[1]),
        body(VLLM_IDS | {"token_ids": [1, -1]}, prompt_token_ids=[1]),
        body(VLLM_IDS | {"token_ids": [1, True]}, prompt_token_ids=[1]),
        body(VLLM_IDS, prompt_token_ids="no"),
        body({"logprobs": {"content": [{"token": "a"}]}}),
        body({"logprobs": {"content": [{"token": "a", "logprob": float("nan")}]}}),
        body({"logprobs": {"content": 5}}),
    ],
    ids=repr,
)
def test_a_broken_reply_is_a_typed_fault(value: Any) -> None:
    assert fault_of(value).kind == "bad_reply"


def test_the_policy_version_comes_from_the_body_or_a_header() -> None:
    assert read(body(policy_version=3)).tokens["policy_version"] == 3
    assert read(body(), **{"x-policy-version": "4"}).tokens["policy_version"] == 4
    assert read(body(policy_version="default")).tokens["policy_version"] == 0


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ["choices", "prompt_token_ids", "usage", "policy_version"]
IN_CHOICE = ["message", "finish_reason", "logprobs", "token_ids", "prompt_token_ids"]


@given(
    st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=2),
    st.dictionaries(st.sampled_from(IN_CHOICE), json_values, max_size=2),
    st.dictionaries(st.sampled_from(["content", "tool_calls", "reasoning", "role"]), json_values, max_size=3),
)
def test_whatever_a_server_says_is_a_reply_or_a_typed_fault(
    top: dict[str, Any], choice: dict[str, Any], message: dict[str, Any]
) -> None:
    try:
        reply = read({**body(choice, message=message or {"content": "x"}), **top})
    except ServerError:
        return
    assert isinstance(reply.content, str)
    assert ("token_ids" in reply.tokens) == ("prompt_ids" in reply.tokens)
