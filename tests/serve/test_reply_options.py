"""Options of a reply, by the model that ships: top_p, top_k, stop, schemas, tool choice, log-probs; streamed or not."""

from __future__ import annotations

import asyncio
import json
import threading
from functools import cache
from typing import Any

import pytest
import torch

from toolwise.models import load_model
from toolwise.policies.local import LocalPolicy
from toolwise.protocols import Sampling
from toolwise.serve.chat import ServedModel
from toolwise.serve.constraints import _THREAD, ReplyConstraints
from toolwise.serve.request import BadRequestError, read_request
from toolwise.tools import build_tools

torch.set_num_threads(1)
SPECS = [tool.get_openai_tool_schema().model_dump() for tool in build_tools(["calculator"]).values()]
PARAMETERS = {
    "type": "object",
    "properties": {"word": {"enum": ["a", "b"]}},
    "required": ["word"],
    "additionalProperties": False,
}
OTHER = {"type": "function", "function": {"name": "look_up", "parameters": PARAMETERS}}
QUESTION = [{"role": "user", "content": "What is 531 * 77?"}]
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer", "maximum": 9}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}


@cache
def served() -> ServedModel:
    return ServedModel.of(LocalPolicy(*load_model("builtin:small", device="cpu"), Sampling(max_new_tokens=48)), "small")


def complete(**fields: Any) -> dict[str, Any]:
    request = read_request(json.dumps({"model": "small", "messages": QUESTION, **fields}).encode())
    return asyncio.run(served().complete(request))


def stream(**fields: Any) -> list[dict[str, Any]]:
    request = read_request(json.dumps({"model": "small", "messages": QUESTION, **fields}).encode())

    async def read() -> list[dict[str, Any]]:
        return [chunk async for chunk in served().stream(request)]

    return asyncio.run(read())


def joined(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The message that the chunks make."""
    message: dict[str, Any] = {"content": ""}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                delta = dict(choice["delta"])
                message["content"] += delta.pop("content", None) or ""
                for part in delta.pop("tool_calls", ()):
                    calls = message.setdefault("tool_calls", [])
                    if part["index"] == len(calls):
                        calls.append(part)
                    else:
                        calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
                message |= delta
    return message


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def test_top_k_of_one_is_greedy_and_top_p_near_zero_too() -> None:
    greedy = text_of(complete(temperature=0))
    assert text_of(complete(temperature=5.0, top_k=1, seed=3)) == greedy
    assert text_of(complete(temperature=1.0, top_p=1e-6, seed=3)) == greedy
    assert text_of(complete(temperature=5.0, seed=3)) != greedy


def test_a_stop_string_ends_the_reply_and_is_left_out() -> None:
    whole = text_of(complete(temperature=0))
    cut, stop = whole[: len(whole) // 2], whole[len(whole) // 2 :][:3]
    answer = complete(temperature=0, stop=["@@", stop])
    assert text_of(answer) == whole[: whole.index(stop)] == cut
    assert answer["choices"][0]["finish_reason"] == "stop"
    chunks = stream(temperature=0, stop=stop)
    assert joined(chunks)["content"] == cut


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 2.0, "seed": 4, "n": 3},
        {"temperature": 0, "tools": SPECS},
        {"temperature": 2.0, "seed": 1, "max_tokens": 5, "tools": SPECS},
        {"temperature": 0, "tools": SPECS, "tool_choice": "none"},
        {"temperature": 0, "tools": [OTHER], "tool_choice": "required"},
    ],
    ids=lambda fields: ",".join(fields),
)
def test_a_stream_joined_is_the_completion(fields: dict[str, Any]) -> None:
    answer, chunks = complete(**fields), stream(**fields)
    for choice in answer["choices"]:
        message, streamed = dict(choice["message"]), joined(chunks, choice["index"])
        if "tool_calls" in streamed:
            streamed["tool_calls"] = [{k: v for k, v in c.items() if k != "index"} for c in streamed["tool_calls"]]
        assert streamed == message | {"content": message["content"] or ""}
        (end,) = [c for k in chunks for c in k["choices"] if c["index"] == choice["index"] and c["finish_reason"]]
        assert end["finish_reason"] == choice["finish_reason"]
    assert chunks[-1]["usage"] == answer["usage"]


def test_text_is_streamed_in_several_pieces() -> None:
    deltas = [c["delta"] for chunk in stream(temperature=0) for c in chunk["choices"]]
    assert len([delta for delta in deltas if delta.get("content")]) > 1


def test_log_probs_are_the_models_own_before_truncation() -> None:
    fields = {"temperature": 1.0, "seed": 5, "max_tokens": 6, "logprobs": True, "top_logprobs": 3}
    plain = complete(**fields)["choices"][0]["logprobs"]
    assert "before top_p" in plain["stage"]
    for entry in plain["content"]:
        tops = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(tops) == 3
        assert tops == sorted(tops, reverse=True)
    greedy = complete(**(fields | {"top_k": 1}))["choices"][0]["logprobs"]["content"]
    assert all(entry["logprob"] == entry["top_logprobs"][0]["logprob"] < 0 for entry in greedy)
    streamed = [c["logprobs"] for chunk in stream(**fields) for c in chunk["choices"] if "logprobs" in c]
    entries = [entry for piece in streamed for entry in piece["content"]]
    assert [e["token"] for e in entries] == [e["token"] for e in plain["content"]]
    assert [e["logprob"] for e in entries] == pytest.approx([e["logprob"] for e in plain["content"]], abs=1e-4)


@pytest.mark.parametrize("format_", [JSON_SCHEMA, {"type": "json_object"}], ids=["schema", "object"])
def test_a_reply_follows_its_schema(format_: dict[str, Any]) -> None:
    answer = complete(temperature=1.0, seed=1, response_format=format_, max_tokens=200)
    choice = answer["choices"][0]
    if choice["finish_reason"] == "stop" or format_ is JSON_SCHEMA:
        value = json.loads(choice["message"]["content"])
        assert isinstance(value, dict)
        assert format_ is not JSON_SCHEMA or (value.keys() == {"answer", "sure"} and value["answer"] <= 9)


def test_a_bad_schema_is_the_clients_error() -> None:
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    with pytest.raises(BadRequestError, match=r"response_format: .*\$\.type") as refused:
        complete(response_format=bad)
    assert refused.value.param == "response_format"


def calls_of(answer: dict[str, Any]) -> list[str]:
    return [call["function"]["name"] for call in answer["choices"][0]["message"].get("tool_calls", ())]


def test_a_tool_is_called_where_one_is_required_or_named() -> None:
    hello = [{"role": "user", "content": "Hello"}]
    tools = [*SPECS, OTHER]
    required = complete(messages=hello, temperature=0, tools=tools, tool_choice="required", parallel_tool_calls=False)
    assert len(calls_of(required)) == 1
    assert required["choices"][0]["finish_reason"] == "tool_calls"
    named = {"type": "function", "function": {"name": "look_up"}}
    answer = complete(messages=hello, temperature=0, tools=tools, tool_choice=named, parallel_tool_calls=False)
    assert calls_of(answer) == ["look_up"]
    arguments = json.loads(answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])
    assert set(arguments.values()) <= {"a", "b"}


def test_a_schema_with_tools_allows_a_call_or_json() -> None:
    answer = complete(temperature=0, tools=SPECS, response_format=JSON_SCHEMA)
    content = answer["choices"][0]["message"]["content"]
    assert calls_of(answer) or set(json.loads(content)) == {"answer", "sure"}


def test_more_tokens_than_the_server_allows_are_refused() -> None:
    limited = ServedModel.of(served().generator, "small", max_new_tokens=8)  # type: ignore[arg-type]
    request = read_request(json.dumps({"model": "small", "messages": QUESTION, "max_tokens": 9}).encode())
    with pytest.raises(BadRequestError, match="at most 8"):
        asyncio.run(limited.complete(request))
    answer = asyncio.run(limited.complete(request.model_copy(update={"max_tokens": None})))
    assert answer["usage"]["completion_tokens"] <= 8


def schema_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def properties(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": schema_of(properties(1_000))},
        {"response_format": schema_of({"enum": ["x" * 64_000]})},
        {"tool_choice": "required", "tools": [{"function": {"name": "f", "parameters": properties(1_000)}}]},
    ],
    ids=["many", "long", "tool"],
)
def test_schemas_that_would_take_long_to_compile_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError, match="too large, at most") as refused:
        complete(**fields)
    assert refused.value.param == next(iter(fields))


def test_a_grammar_that_is_compiled_holds_up_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    compiling, may_end = threading.Event(), threading.Event()

    def slowly(*arguments: Any) -> None:
        compiling.set()
        may_end.wait(20)

    monkeypatch.setattr(ReplyConstraints, "_compile", slowly)

    async def play() -> None:
        body = {"model": "small", "messages": QUESTION, "max_tokens": 1}
        plain = read_request(json.dumps(body).encode())
        unknown = schema_of({"type": "object", "properties": {"never compiled": {"type": "string"}}})
        formed = read_request(json.dumps(body | {"response_format": unknown}).encode())
        slow = [asyncio.create_task(served().complete(formed)) for _ in range(3)]
        assert await asyncio.to_thread(compiling.wait, 20)
        answer = await asyncio.wait_for(served().complete(plain), 15)
        assert answer["usage"]["completion_tokens"] == 1
        assert not any(task.done() for task in slow)
        may_end.set()
        await asyncio.gather(*slow)

    asyncio.run(play())


def test_a_stop_token_outside_the_vocabulary_is_the_clients_error() -> None:
    with pytest.raises(BadRequestError, match="not in the model's vocabulary") as refused:
        complete(stop_token_ids=[2**31 - 1], response_format=JSON_SCHEMA)
    assert refused.value.param == "stop_token_ids"


def test_a_grammar_that_gets_too_complex_is_the_clients_error() -> None:
    letters = {f"p{i}": {"type": "string", "pattern": f"^[a-z]{{{i % 50 + 1}}}$"} for i in range(600)}
    with pytest.raises(BadRequestError, match="the grammar of a request failed") as refused:
        complete(temperature=0, response_format=schema_of({"type": "object", "properties": letters}))
    assert refused.value.param == "response_format"


def test_a_grammar_that_is_known_does_not_wait_for_one_that_is_compiled() -> None:
    pytest.importorskip("llguidance")
    complete(response_format=JSON_SCHEMA, max_tokens=1)
    constraints, may_end = served()._constraints, threading.Event()
    assert constraints is not None

    async def play() -> None:
        busy = asyncio.get_running_loop().run_in_executor(_THREAD, may_end.wait, 20)
        body = {"model": "small", "messages": QUESTION, "max_tokens": 1, "response_format": JSON_SCHEMA}
        request = read_request(json.dumps(body).encode())
        assert await asyncio.wait_for(constraints.of(request), 15) is not None
        assert not busy.done()
        may_end.set()
        await busy

    asyncio.run(play())
