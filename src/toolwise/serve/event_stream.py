"""A streamed answer as server-sent events. The status is sent with the first event, so that errors before it are plain
HTTP errors; a client that disconnects ends the generation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

from toolwise.serve.completion import DONE, event
from toolwise.serve.request import BadRequestError, ChatRequest

if TYPE_CHECKING:
    from toolwise.serve.app import _Handlers

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


@asynccontextmanager
async def within_deadline(seconds: float) -> AsyncIterator[None]:
    """Turns the end of the time into an error for the client."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise BadRequestError(
            f"no answer within {seconds:g} s: ask for fewer tokens, or try again later",
            code="deadline_exceeded",
            status=504,
        ) from None


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


class EventStream:
    """An ASGI response: admits the request, generates and sends."""

    def __init__(self, handlers: _Handlers, request: ChatRequest, start: float) -> None:
        self.handlers, self.request, self.start = handlers, request, start
        self._begun = False

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._answer(scope, receive, send))
        gone = asyncio.create_task(wait_for_disconnect(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _answer(self, scope: Any, receive: Receive, send: Send) -> None:
        from toolwise.serve.app import error_answer

        handlers = self.handlers
        try:
            async with (
                within_deadline(handlers.limits.deadline_s),
                handlers.admission.slot(),
                aclosing(handlers.served.stream(self.request)) as chunks,  # type: ignore[type-var]
            ):
                async for chunk in chunks:
                    await self._send(chunk, send)
            await _send_text(send, DONE)
        except Exception as fault:  # only this request fails; the server keeps running
            answer = error_answer(fault)
            if not self._begun:
                await answer(scope, receive, send)
                return
            await _send_text(send, f"data: {answer.body.decode()}\n\n")
        handlers.metrics.answer_s.observe(time.perf_counter() - self.start)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, chunk: dict[str, Any], send: Send) -> None:
        from toolwise.serve.app import answer_headers

        if not chunk["choices"]:
            self.handlers.metrics.count_usage(chunk["usage"])
            if not self.request.stream_options.include_usage:
                return
        if not self._begun:
            self._begun = True
            self.handlers.metrics.first_token_s.observe(time.perf_counter() - self.start)
            fixed = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
            headers = [(k.encode(), v.encode()) for k, v in (fixed | answer_headers(chunk)).items()]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send_text(send, event(chunk))


async def _send_text(send: Send, text: str) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
