"""Hands tokens and results of requests to the event loops that wait for them."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence

from toolwise.concurrency.loop_mailbox import LoopMailbox
from toolwise.engine.request import Request, SampledPiece

News = tuple[Request, int]
"""A request, and how many tokens of it were sampled."""


class TokenStreams:
    """Hands new tokens to those who read along: the first and the last of a request at once, others at intervals."""

    def __init__(self) -> None:
        self.interval_s = 0.02
        """A reader sees no difference, and reporting each token costs much more; 0: after each step."""
        self.step_s = 0.05
        """Duration of the last decode step; at first a guess that is too long rather than too short."""
        self._reported_at = 0.0
        self._mailbox = LoopMailbox[News](self._hand_out)

    @property
    def max_steps(self) -> int:
        """How many decode steps fit the interval."""
        return max(1, round(self.interval_s / self.step_s))

    def report(self, requests: Iterable[Request], finished: Iterable[Request]) -> None:
        now = time.perf_counter()
        if now - self._reported_at + self.step_s / 2 >= self.interval_s:
            self._reported_at = now
            self.report_now(requests)
        else:
            self.report_now([*(request for request in requests if not request.reported), *finished])

    def report_now(self, requests: Iterable[Request]) -> None:
        """Tell those who read along how far each request is. The engine's thread does no more than that: it has the
        next step to start."""
        by_loop: dict[asyncio.AbstractEventLoop, list[News]] = defaultdict(list)
        for request in requests:
            if request.streams and request.sampled > request.reported:
                request.reported = request.sampled
                by_loop[request.loop].append((request, request.reported))
        for loop, news in by_loop.items():
            self._mailbox.send(loop, news)

    def _hand_out(self, loop: asyncio.AbstractEventLoop, news: list[News]) -> None:
        for request, end in _joined(news) if self.interval_s > 0 else news:
            try:
                _read_to(request, end)
            except Exception as fault:  # of one caller; the others get their tokens
                loop.call_exception_handler({"message": "a stream of tokens failed", "exception": fault})


def _joined(news: list[News]) -> Iterable[News]:
    """Of each request, its first token and then all the others in one piece."""
    firsts = [(request, end) for request, end in news if not request.received]
    return [*dict(reversed(firsts)).items(), *dict(news).items()] if firsts else dict(news).items()


def _read_to(request: Request, end: int) -> None:
    """Hand out the tokens before `end` that were not yet."""
    first, request.received = request.received, end
    if first == end:
        return
    new = request.tokens[request.prompt_length + first : request.prompt_length + end]
    if request.on_tokens is not None:
        request.on_tokens(new)
    if request.options.on_sampled is not None:
        piece = SampledPiece(new, request.logprobs[first:end], request.top_logprobs[first:end])
        request.options.on_sampled(piece)


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
