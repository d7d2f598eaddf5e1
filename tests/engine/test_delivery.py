"""Streams of tokens: first and last ones at once, others at intervals, and one caller's fault is no other's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from toolwise.engine.delivery import TokenStreams
from toolwise.engine.request import Request, ServingOptions
from toolwise.protocols import Sampling


def streamed(on_tokens: Callable[[Sequence[int]], None]) -> Request:
    loop = asyncio.get_running_loop()
    request = Request("generate", [1, 2], 2, Sampling(), loop.create_future(), loop)
    request.on_tokens = on_tokens
    return request


def test_tokens_are_collected_for_the_interval() -> None:
    async def work() -> list[list[int]]:
        seen: list[list[int]] = []
        request, streams = streamed(lambda ids: seen.append(list(ids))), TokenStreams()
        streams.interval_s, streams.step_s = 3600.0, 0.0
        streams.report([], [])  # the clock starts
        for token in (5, 6, 7):
            request.tokens.append(token)
            streams.report([request], [])
        request.tokens.append(8)
        streams.report([request], [request])
        await asyncio.sleep(0)
        return seen

    assert asyncio.run(work()) == [[5], [6, 7, 8]]


def test_without_an_interval_every_step_is_reported() -> None:
    async def work() -> list[list[int]]:
        seen: list[list[int]] = []
        request, streams = streamed(lambda ids: seen.append(list(ids))), TokenStreams()
        streams.interval_s = 0.0
        for token in (5, 6, 7):
            request.tokens.append(token)
            streams.report([request], [])
        await asyncio.sleep(0)
        return seen

    assert asyncio.run(work()) == [[5], [6], [7]]
    assert TokenStreams().max_steps == 1


def test_a_loop_that_was_busy_gets_one_piece_of_each_request() -> None:
    async def work() -> list[tuple[list[int], list[float]]]:
        seen: list[tuple[list[int], list[float]]] = []
        streams = TokenStreams()
        request = streamed(lambda ids: None)
        request.options = ServingOptions(
            on_sampled=lambda piece: seen.append((list(piece.token_ids), list(piece.logprobs)))
        )
        for token in (5, 6, 7, 8):
            request.tokens.append(token)
            request.logprobs.append(-token)
            streams.report_now([request])
        await asyncio.sleep(0)
        request.tokens.append(9)  # not reported yet
        return seen

    assert asyncio.run(work()) == [([5], [-5.0]), ([6, 7, 8], [-6.0, -7.0, -8.0])]


def test_a_reader_that_fails_does_not_keep_tokens_from_others() -> None:
    async def work() -> tuple[list[int], list[str]]:
        faults: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context["message"]))
        seen: list[int] = []

        def fail(ids: Any) -> None:
            raise ValueError("no")

        requests = [streamed(fail), streamed(seen.extend)]
        for request in requests:
            request.tokens.append(9)
        TokenStreams().report_now(requests)
        await asyncio.sleep(0)
        return seen, faults

    assert asyncio.run(work()) == ([9], ["a stream of tokens failed"])
