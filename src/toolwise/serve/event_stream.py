"""A streamed answer as server-sent events. The status is sent with the first event, so that errors before it are plain
HTTP errors; a client that disconnects ends the generation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

from toolwise.serve.completion import DONE, event
from toolwise.serve.request import BadRequestError

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Chunks = AsyncGenerator[dict[str, Any], None]


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
    """An ASGI response: sends chunks while they are made. `refuse` turns an error into a response; `headers` reads the
    response's headers from the first chunk."""

    def __init__(
        self,
        chunks: Chunks,
        refuse: Callable[[Exception], Any],
        headers: Callable[[dict[str, Any]], Mapping[str, str]] = lambda chunk: {},
    ) -> None:
        self.chunks, self.refuse, self.headers = chunks, refuse, headers
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
        try:
            async with aclosing(self.chunks) as chunks:
                async for chunk in chunks:
                    await self._send(chunk, send)
            await _send_text(send, DONE)
        except Exception as fault:  # only this request fails; the server keeps running
            answer = self.refuse(fault)
            if not self._begun:
                await answer(scope, receive, send)
                return
            await _send_text(send, f"data: {answer.body.decode()}\n\n")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, chunk: dict[str, Any], send: Send) -> None:
        if not self._begun:
            self._begun = True
            fixed = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
            headers = [(k.encode(), v.encode()) for k, v in (fixed | dict(self.headers(chunk))).items()]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send_text(send, event(chunk))


async def _send_text(send: Send, text: str) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
