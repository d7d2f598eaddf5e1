"""Pieces of a stream take the short cut to the client while nothing else is to do, and wait their turn otherwise."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest

from toolwise.engine.request import SampledPiece
from toolwise.models import load_model
from toolwise.protocols import Generation
from toolwise.rollout.chat_tokenizer import ChatTokenizer
from toolwise.serve.choice_stream import ChoiceStream
from toolwise.serve.completion import AnswerHead, Completion, event
from toolwise.serve.event_stream import ShortCut
from toolwise.serve.model_stream import ModelStream
from toolwise.serve.request import ChatRequest


@cache
def chat() -> ChatTokenizer:
    return load_model("builtin:small", device="cpu")[1]


def stream(write: Callable[[bytes], bool], decode: Any = None, **fields: Any) -> ModelStream:
    request = ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "?"}], **fields})
    choices = [ChoiceStream(decode or chat().decode) for _ in range(request.n)]
    return ModelStream(chat(), Completion(AnswerHead("m"), request, [1]), choices, ShortCut(write), merges=True)


def piece(text: str) -> SampledPiece:
    ids = chat().encode(text)
    return SampledPiece(ids, [-1.0] * len(ids))


async def while_waiting(one: ModelStream, do: Callable[[], None]) -> asyncio.Task[Any]:
    """Call `do` while the stream waits for something to do."""
    waits = asyncio.create_task(one.next())
    await asyncio.sleep(0)
    do()
    return waits


def test_an_event_by_the_short_cut_is_what_its_chunk_would_be() -> None:
    sent: list[bytes] = []
    chunks: list[bytes] = []
    texts = ["first", 'a "quote"', " é 日本 🦀\n", "\\", "</end>"]

    async def work() -> None:
        short = stream(lambda data: not data or not sent.append(data))  # type: ignore[func-returns-value]
        long = stream(lambda data: False)
        long.completion.head = short.completion.head
        waits = await while_waiting(short, lambda: [short.add(0, piece(text)) for text in texts])  # type: ignore[arg-type,return-value]
        waits.cancel()
        chunks.extend(event(chunk).encode() for text in texts if (chunk := long.chunk(0, piece(text))))

    asyncio.run(work())
    assert len(sent) == len(texts)
    assert sent == chunks


@pytest.mark.parametrize("fields", [{"logprobs": True}, {"return_token_ids": True}])
def test_log_probs_and_token_ids_take_the_short_cut_too(fields: dict[str, Any]) -> None:
    sent: list[bytes] = []

    async def work() -> None:
        one = stream(lambda data: not data or not sent.append(data), **fields)  # type: ignore[func-returns-value]
        (await while_waiting(one, lambda: one.add(0, piece("hello")))).cancel()

    asyncio.run(work())
    assert b'"logprobs"' in sent[0] or b'"token_ids"' in sent[0]


def test_a_client_that_does_not_keep_up_gets_chunks_in_order() -> None:
    async def work() -> list[Any]:
        one = stream(lambda data: False)
        for text in ("one", " two"):
            one.add(0, piece(text))  # nobody waits yet
        waits = await while_waiting(one, lambda: None)
        index, merged = await waits
        return [one.chunk(index, merged)["choices"][0]["delta"]["content"]]  # type: ignore[index]

    assert asyncio.run(work()) == ["one two"]


def test_what_comes_behind_a_piece_that_waits_does_not_overtake_it() -> None:
    sent: list[bytes] = []
    open_now: list[bool] = [False]

    def write(data: bytes) -> bool:
        if open_now[0] and data:
            sent.append(data)
        return open_now[0]

    async def work() -> Any:
        one = stream(write)

        def do() -> None:
            one.add(0, piece("first"))
            open_now[0] = True
            one.add(0, piece(" second"))  # the task has been woken, but has not run

        return (await (await while_waiting(one, do)))[1]

    assert asyncio.run(work()) == piece("first") + piece(" second")
    assert sent == []


def test_an_end_is_never_sent_by_the_short_cut() -> None:
    async def work() -> Any:
        one = stream(lambda data: True)
        end = asyncio.create_task(asyncio.sleep(0, Generation(array("i"), array("f"), "stop", 0)))
        await end
        return (await (await while_waiting(one, partial(one.add, 0, end))))[1] is end

    assert asyncio.run(work())


def test_a_fault_on_the_short_cut_is_the_streams() -> None:
    def decode(ids: Any) -> str:
        raise KeyError("broken")

    async def work() -> None:
        one = stream(lambda data: True, decode)
        await (await while_waiting(one, lambda: one.add(0, piece("x"))))

    with pytest.raises(KeyError, match="broken"):
        asyncio.run(work())
