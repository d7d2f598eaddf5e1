"""The ASGI app: routes, body limits, OpenAI-style errors, and cancellation when a client disconnects."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from toolwise.errors import MissingExtraError
from toolwise.serve.chat import ServedModel, error_response
from toolwise.serve.guard import RequestGuard
from toolwise.serve.limits import MAX_TOTAL_BODY_BYTES, ServerLimits
from toolwise.serve.request import BadRequestError
from toolwise.serve.stream import completion_events

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

log = logging.getLogger("toolwise.serve")


def build_app(served: ServedModel, *, hosts: Sequence[str] = (), limits: ServerLimits | None = None) -> Starlette:
    """`/health`, `/v1/models` and `/v1/chat/completions` for one model.

    Accepts requests for localhost, for the address it is bound to, and for the names in `hosts` ("*": any name).
    """
    try:
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.middleware import Middleware
        from starlette.requests import ClientDisconnect
        from starlette.responses import JSONResponse, Response, StreamingResponse
        from starlette.routing import Route
    except ModuleNotFoundError as missing:
        raise MissingExtraError("starlette", "serve") from missing

    created = int(time.time())
    limits = limits or ServerLimits()
    bodies = BodyReader(served.limits.body_bytes, limits.body_s)

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(request: Request) -> Response:
        model = {"id": served.name, "object": "model", "created": created, "owned_by": "toolwise"}
        return JSONResponse({"object": "list", "data": [model]})

    async def chat_completions(request: Request) -> Response:
        try:
            async with bodies.read(request) as raw:
                chat_request = await served.read(raw)
            answer = await _cancel_on_disconnect(request, served.complete(chat_request))
        except ClientDisconnect:
            answer = None
        except Exception as fault:  # only this request fails; the server keeps running
            return error_answer(fault)
        if answer is None:
            return Response(status_code=499)  # the client is gone
        if chat_request.stream:
            return StreamingResponse(completion_events(answer), media_type="text/event-stream")
        return JSONResponse(answer)

    def error_answer(fault: Exception) -> Response:
        status, body = error_response(fault)
        if status >= 500 and not isinstance(fault, BadRequestError):
            log.error("%s: %s", type(fault).__name__, fault, exc_info=fault)
        close_connection = isinstance(fault, BadRequestError) and fault.close_connection
        return JSONResponse(body, status_code=status, headers={"connection": "close"} if close_connection else None)

    async def http_error(request: Request, fault: Exception) -> Response:
        assert isinstance(fault, HTTPException)
        status, body = error_response(BadRequestError(str(fault.detail), status=fault.status_code))
        return JSONResponse(body, status_code=status, headers=fault.headers)

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", models),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        ],
        middleware=[Middleware(RequestGuard, refuse=error_answer, hosts=hosts, limits=limits)],
        exception_handlers={HTTPException: http_error},
    )


class BodyReader:
    """Reads request bodies: limits the size and time of each, and the total size of all at once."""

    def __init__(self, max_bytes: int, body_s: float) -> None:
        self.max_bytes = max_bytes
        self.body_s = body_s
        self._held = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        if int(request.headers.get("content-length", "0")) > self.max_bytes:
            raise self._too_large()
        raw = bytearray()
        try:
            await self._fill(raw, request)
            yield bytes(raw)
        finally:
            self._held -= len(raw)

    async def _fill(self, raw: bytearray, request: Request) -> None:
        try:
            async with asyncio.timeout(self.body_s):
                async for chunk in request.stream():
                    raw += chunk
                    self._held += len(chunk)
                    if len(raw) > self.max_bytes:
                        raise self._too_large()
                    if self._held > MAX_TOTAL_BODY_BYTES:
                        raise BadRequestError("too many large requests at once: try again", status=503)
        except TimeoutError:
            raise BadRequestError(
                f"the body did not arrive within {self.body_s:g} s", status=408, close_connection=True
            ) from None

    def _too_large(self) -> BadRequestError:
        return BadRequestError(f"the body is larger than {self.max_bytes} bytes", status=413)


async def _cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any] | None:
    """The result of `work`; None if the client disconnects first: a request that is retried must not run twice."""
    completion = asyncio.create_task(work)
    gone = asyncio.create_task(_wait_for_disconnect(request))
    try:
        await asyncio.wait({completion, gone}, return_when=asyncio.FIRST_COMPLETED)
        return completion.result() if completion.done() else None
    finally:
        for task in (completion, gone):
            task.cancel()
        await asyncio.gather(completion, gone, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue
