"""The HTTP side: routes, sizes, errors in OpenAI's form, and clients who leave before they are answered."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from toolwise.errors import MissingExtraError
from toolwise.serve.chat import Served, error_of
from toolwise.serve.request import BadRequestError, read_request
from toolwise.serve.stream import events

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

log = logging.getLogger("toolwise.serve")

MAX_BODY_BYTES = 32_000_000


def build_app(served: Served) -> Starlette:
    """`/health`, `/v1/models` and `/v1/chat/completions` for one model."""
    try:
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.requests import ClientDisconnect
        from starlette.responses import JSONResponse, Response, StreamingResponse
        from starlette.routing import Route
    except ModuleNotFoundError as missing:
        raise MissingExtraError("starlette", "serve") from missing

    began = int(time.time())

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(request: Request) -> Response:
        model = {"id": served.name, "object": "model", "created": began, "owned_by": "toolwise"}
        return JSONResponse({"object": "list", "data": [model]})

    async def chat_completions(request: Request) -> Response:
        try:
            asked = read_request(await _body(request))
            answer = await _unless_gone(request, served.complete(asked))
        except ClientDisconnect:
            answer = None
        except Exception as fault:  # one request's trouble; the server goes on
            return told(fault)
        if answer is None:
            return Response(status_code=499)  # nobody reads it
        if asked.stream:
            return StreamingResponse(events(answer), media_type="text/event-stream")
        return JSONResponse(answer)

    def told(fault: Exception) -> Response:
        status, body = error_of(fault)
        if status >= 500:
            log.error("%s: %s", type(fault).__name__, fault, exc_info=fault)
        return JSONResponse(body, status_code=status)

    async def no_such_place(request: Request, fault: Exception) -> Response:
        assert isinstance(fault, HTTPException)
        status, body = error_of(BadRequestError(str(fault.detail), status=fault.status_code))
        return JSONResponse(body, status_code=status, headers=fault.headers)

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", models),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        ],
        exception_handlers={HTTPException: no_such_place},
    )


async def _body(request: Request) -> bytes:
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MAX_BODY_BYTES:
            raise BadRequestError(f"the body is larger than {MAX_BODY_BYTES} bytes", status=413)
    return bytes(raw)


async def _unless_gone(request: Request, work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any] | None:
    """What `work` gives; None where the client left first: a request given up and asked anew must not be done twice."""
    completion = asyncio.create_task(work)
    gone = asyncio.create_task(_left(request))
    try:
        await asyncio.wait({completion, gone}, return_when=asyncio.FIRST_COMPLETED)
        return completion.result() if completion.done() else None
    finally:
        for task in (completion, gone):
            task.cancel()
        await asyncio.gather(completion, gone, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue
