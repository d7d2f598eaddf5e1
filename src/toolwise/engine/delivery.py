"""Hands tokens and results of requests to the event loops that wait for them."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from toolwise.engine.request import Request, SampledPiece


class TokenStreams:
    """Hands new tokens to those who read along: the first and the last of a request at once, others at intervals."""

    def __init__(self) -> None:
        self.interval_s = 0.02
        """A reader sees no difference, and reporting each token costs much more; 0: after each step."""
        self.step_s = 0.05
        """Duration of the last decode step; at first a guess that is too long rather than too short."""
        self._reported_at = 0.0

    @property
    def max_steps(self) -> int:
        """How many decode steps fit the interval."""
        return max(1, round(self.interval_s / self.step_s))

    def report(self, requests: Iterable[Request], finished: Iterable[Request]) -> None:
        now = time.perf_counter()
        if now - self._reported_at + self.step_s / 2 >= self.interval_s:
            self._reported_at = now
            report_tokens(requests)
        else:
            report_tokens([*(request for request in requests if not request.reported), *finished])


def report_tokens(requests: Iterable[Request]) -> None:
    """Tell each request that streams its new tokens, in one call per event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Callable[[Any], None], Any]]] = defaultdict(list)
    for request in requests:
        if request.streams and request.sampled > request.reported:
            first, request.reported = request.reported, request.sampled
            new, reports = request.tokens[request.prompt_length + first :], by_loop[request.loop]
            if request.on_tokens is not None:
                reports.append((request.on_tokens, new))
            if request.options.on_sampled is not None:
                piece = SampledPiece(new, request.logprobs[first:], request.top_logprobs[first:])
                reports.append((request.options.on_sampled, piece))
    for loop, reports in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed, so no caller waits there
            loop.call_soon_threadsafe(_report, loop, reports)


def _report(loop: asyncio.AbstractEventLoop, reports: Sequence[tuple[Callable[[Any], None], Any]]) -> None:
    for report, value in reports:
        try:
            report(value)
        except Exception as fault:  # of one caller; the others get their tokens
            loop.call_exception_handler({"message": "a stream of tokens failed", "exception": fault})


def deliver(finished: Iterable[Request]) -> None:
    """Hand each event loop the results of its requests, in one call per loop; at once to the loop that runs here."""
    here = asyncio._get_running_loop()
    by_loop: dict[asyncio.AbstractEventLoop, list[Request]] = defaultdict(list)
    for request in finished:
        if request.hidden is not None:  # here, on the stream that computed it
            request.hidden = request.hidden.cpu()
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
