"""Hands tokens and results of requests to the event loops that wait for them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress

from toolwise.engine.request import Request, SampledPiece


def report_tokens(requests: Iterable[Request]) -> None:
    """Tell each request that streams its new tokens."""
    for request in requests:
        if request.streams and request.sampled > request.reported:
            first, request.reported = request.reported, request.sampled
            new = request.tokens[request.prompt_length + first :]
            with suppress(RuntimeError):  # the loop is closed, so no caller waits there
                if request.on_tokens is not None:
                    request.loop.call_soon_threadsafe(request.on_tokens, new)
                if request.options.on_sampled is not None:
                    piece = SampledPiece(new, request.logprobs[first:], request.top_logprobs[first:])
                    request.loop.call_soon_threadsafe(request.options.on_sampled, piece)


def deliver(finished: Iterable[Request]) -> None:
    """Hand each event loop the results of its requests, in one call per loop; at once to the loop that runs here."""
    here = asyncio._get_running_loop()
    by_loop: dict[asyncio.AbstractEventLoop, list[Request]] = defaultdict(list)
    for request in finished:
        by_loop[request.loop].append(request)
    for loop, requests in by_loop.items():
        if loop is here:
            _resolve(requests)
            continue
        try:
            loop.call_soon_threadsafe(_resolve, requests)
        except RuntimeError:  # the loop is closed, so no caller waits there
            continue


def _resolve(requests: Sequence[Request]) -> None:
    for request in requests:
        if request.future.done():
            continue
        if request.fault is not None:
            request.future.set_exception(request.fault)
        else:
            request.future.set_result(request.result())
