"""A completion as events: joined again, they equal the completion."""

from __future__ import annotations

import json
from typing import Any

from toolwise.serve.chat import completion_events

CALL = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ANSWER: dict[str, Any] = {
    "id": "x",
    "object": "chat.completion",
    "created": 5,
    "model": "m",
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop", "token_ids": [1]},
        {
            "index": 1,
            "message": {"role": "assistant", "content": None, "tool_calls": [CALL]},
            "finish_reason": "tool_calls",
            "logprobs": {"content": []},
        },
    ],
    "usage": {"total_tokens": 3},
    "prompt_token_ids": [7],
    "policy_version": 2,
}


def chunks() -> list[dict[str, Any]]:
    lines = list(completion_events(ANSWER))
    assert lines[-1] == "data: [DONE]\n\n"
    assert all(line.startswith("data: ") and line.endswith("\n\n") and line.count("\n") == 2 for line in lines)
    return [json.loads(line[6:]) for line in lines[:-1]]


def test_each_choice_comes_whole_and_then_ends() -> None:
    first, first_end, second, second_end, last = chunks()
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "hi"}
    assert first["choices"][0]["token_ids"] == [1]
    assert first_end["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "stop"}
    assert second["choices"][0]["delta"]["tool_calls"] == [{"index": 0, **CALL}]
    assert second["choices"][0]["finish_reason"] is None
    assert second_end["choices"][0] == {"index": 1, "delta": {}, "finish_reason": "tool_calls"}
    assert last["choices"] == []
    assert (last["usage"], last["prompt_token_ids"], last["policy_version"]) == ({"total_tokens": 3}, [7], 2)


def test_every_chunk_says_whose_it_is() -> None:
    heads = {(c["id"], c["object"], c["created"], c["model"]) for c in chunks()}
    assert heads == {("x", "chat.completion.chunk", 5, "m")}
