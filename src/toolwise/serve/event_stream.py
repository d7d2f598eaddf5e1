"""A streamed answer as server-sent events. The status is sent with the first event, so that errors before it are plain
HTTP errors; a client that disconnects ends the generation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from toolwise.serve.completion import DONE, event
from toolwise.serve.request import BadRequestError

WRITE = "toolwise.write"
"""ASGI extension of our protocol: `scope["extensions"][WRITE](data)` writes a part of a body that has begun, at once,
and returns whether it did. It does not if the client does not keep up: then `send` waits for it. Without data it only
says whether it would."""

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


def _refuse_write(data: bytes) -> bool:
    return False


@dataclass(slots=True, eq=False)
class ShortCut:
    """Sends an event of a stream at once, for whoever makes its chunks and waits for more to say: waking a task for
    each event costs the server more than the event does."""

    write: Callable[[bytes], bool] = _refuse_write
    """Whether the event was sent; of nothing, whether one would be. It is not before the first chunk, nor where the
    client does not keep up: then it has to be yielded as a chunk."""


class EventStream:
    """An ASGI response: sends chunks while they are made. `refuse` turns an error into a response; `headers` reads the
    response's headers from the first chunk; `short_cut` is open from the first chunk to the last."""

    def __init__(
        self,
        chunks: Chunks,
        refuse: Callable[[Exception], Any],
        headers: Callable[[dict[str, Any]], Mapping[str, str]] = lambda chunk: {},
        short_cut: ShortCut | None = None,
    ) -> None:
        self.chunks, self.refuse, self.headers, self.short_cut = chunks, refuse, headers, short_cut
        self._begun = False
        self._write = _refuse_write

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        self._write = scope.get("extensions", {}).get(WRITE, _refuse_write)
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
            await self._send_text(DONE, send)
        except Exception as fault:  # only this request fails; the server keeps running
            answer = self.refuse(fault)
            if not self._begun:
                await answer(scope, receive, send)
                return
            await self._send_text(f"data: {answer.body.decode()}\n\n", send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, chunk: dict[str, Any], send: Send) -> None:
        if not self._begun:
            self._begun = True
            fixed = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
            headers = [(k.encode(), v.encode()) for k, v in (fixed | dict(self.headers(chunk))).items()]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            if self.short_cut is not None:
                self.short_cut.write = self._write
        await self._send_text(event(chunk), send)

    async def _send_text(self, text: str, send: Send) -> None:
        data = text.encode()
        if not self._write(data):
            await send({"type": "http.response.body", "body": data, "more_body": True})
