"""A completion as events: joined again, they equal the completion."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from toolwise.engine.request import SampledPiece
from toolwise.serve.chat import completion_events
from toolwise.serve.piece_queue import Event, Events, next_event

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


def next_events(events: Events, count: int, *, merge: bool = True) -> list[Any]:
    async def read() -> list[Any]:
        held: list[Event] = []
        return [await next_event(events, held, merge=merge) for _ in range(count)]

    return asyncio.run(read())


def waiting(*pieces: tuple[int, SampledPiece]) -> Events:
    events = Events()
    for piece in pieces:
        events.put_nowait(piece)
    return events


def test_pieces_that_wait_are_one_and_keep_their_choice() -> None:
    first, second = SampledPiece([1], [-0.5], [[(1, -0.5)]]), SampledPiece([2, 3], [-1.0, -2.0], [[(9, 0.0)], []])
    other = SampledPiece([7], [-3.0])
    merged, alone, last = next_events(waiting((0, first), (0, second), (1, other), (0, first)), 3)
    assert merged == (0, SampledPiece([1, 2, 3], [-0.5, -1.0, -2.0], [[(1, -0.5)], [(9, 0.0)], []]))
    assert (alone, last) == ((1, other), (0, first))


def test_pieces_stay_apart_where_each_token_is_an_event() -> None:
    pieces = [(0, SampledPiece([token], [-1.0])) for token in range(3)]
    assert next_events(waiting(*pieces), 3, merge=False) == pieces
