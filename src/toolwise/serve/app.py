"""The ASGI app: routes, OpenAI-style errors, streams, and cancellation when a client disconnects."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

from toolwise.errors import MissingExtraError
from toolwise.serve.admission import Admission
from toolwise.serve.chat import error_response
from toolwise.serve.event_stream import Chunks, EventStream, ShortCut, wait_for_disconnect, within_deadline
from toolwise.serve.guard import LOOPBACK, ApiKeys, BodyReader, RequestGuard
from toolwise.serve.limits import ServerLimits, TextLimits
from toolwise.serve.prometheus import CONTENT_TYPE, ServerMetrics
from toolwise.serve.request import BadRequestError, ChatRequest

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = ["LOOPBACK", "BadRequestError", "BodyReader", "RequestGuard", "Served", "ServerLimits", "build_app"]

log = logging.getLogger("toolwise.serve")


class Served(Protocol):
    """What an app serves: a model, or an agent that runs its own tools."""

    @property
    def name(self) -> str: ...

    @property
    def limits(self) -> TextLimits: ...

    async def read(self, raw: bytes) -> ChatRequest: ...

    async def complete(self, request: ChatRequest) -> dict[str, Any]: ...

    def stream(self, request: ChatRequest, short_cut: ShortCut | None = None) -> AsyncIterator[dict[str, Any]]:
        """The chunks of an answer; those in the middle may take the short cut."""

    def metrics(self) -> Mapping[str, float]:
        """Figures of the engine."""

    def close(self) -> None:
        """End what runs outside this process. May take long."""


def build_app(
    served: Served,
    *,
    hosts: Sequence[str] = (),
    limits: ServerLimits | None = None,
    keys: Sequence[str] = (),
    admission: Admission | None = None,
    metrics: ServerMetrics | None = None,
) -> Starlette:
    """`/v1/chat/completions`, `/v1/models`, `/health`, `/ready` and `/metrics` for one model or agent.

    Accepts requests for localhost, for the address it is bound to, and for the names in `hosts` ("*": any name). With
    `keys`, all but /health and /ready need one of them as a bearer token.
    """
    try:
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.middleware import Middleware
        from starlette.responses import JSONResponse
        from starlette.routing import Route
    except ModuleNotFoundError as missing:
        raise MissingExtraError("starlette", "serve") from missing

    limits = limits or ServerLimits()
    handlers = _Handlers(served, limits, admission or Admission(limits), metrics or ServerMetrics())

    async def http_error(request: Request, fault: Exception) -> Response:
        assert isinstance(fault, HTTPException)
        _, body = error_response(BadRequestError(str(fault.detail), status=fault.status_code))
        return JSONResponse(body, status_code=fault.status_code, headers=fault.headers)

    names = frozenset(host.lower() for host in (*LOOPBACK, *hosts))
    guard = Middleware(RequestGuard, refuse=error_answer, hosts=names, limits=limits, keys=ApiKeys(keys))
    return Starlette(
        routes=[
            Route("/health", handlers.health),
            Route("/ready", handlers.ready),
            Route("/metrics", handlers.exposition),
            Route("/v1/models", handlers.models),
            Route("/v1/chat/completions", handlers.chat_completions, methods=["POST"]),
        ],
        middleware=[Middleware(_CountResponses, counts=handlers.metrics.responses), guard],
        exception_handlers={HTTPException: http_error},
    )


class _Handlers:
    """The routes' functions, over one served model."""

    def __init__(self, served: Served, limits: ServerLimits, admission: Admission, metrics: ServerMetrics) -> None:
        self.served, self.limits, self.admission, self.metrics = served, limits, admission, metrics
        self.bodies = BodyReader(served.limits.body_bytes, limits.body_s)
        self.created = int(time.time())

    async def health(self, request: Request) -> Response:
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        state = "draining" if self.admission.draining else "ready" if self.admission.warm else "starting"
        return _json({"status": state}, 200 if state == "ready" else 503)

    async def models(self, request: Request) -> Response:
        model = {"id": self.served.name, "object": "model", "created": self.created, "owned_by": "toolwise"}
        return _json({"object": "list", "data": [model]})

    async def exposition(self, request: Request) -> Response:
        from starlette.responses import Response

        gauges = {"requests_active": self.admission.active, "requests_waiting": self.admission.waiting}
        text = self.metrics.text({**gauges, **self.served.metrics()})
        return Response(text, media_type=CONTENT_TYPE)

    async def chat_completions(self, request: Request) -> Response:
        from starlette.requests import ClientDisconnect
        from starlette.responses import Response

        start = time.perf_counter()
        try:
            self.admission.check()  # before the body is read; again when the request gets its turn
            async with self.bodies.read(request) as raw:
                chat_request = await self.served.read(raw)
            if chat_request.stream:
                short_cut = ShortCut()
                chunks = self._stream(chat_request, start, short_cut)
                return EventStream(chunks, error_answer, answer_headers, short_cut)  # type: ignore[return-value]
            answer = await _cancel_on_disconnect(request, self._complete(chat_request, start))
        except ClientDisconnect:
            answer = None
        except Exception as fault:  # only this request fails; the server keeps running
            refusal: Response = error_answer(fault)
            return refusal
        if answer is None:
            return Response(status_code=499)  # the client is gone
        return _json(answer, headers=answer_headers(answer))

    async def _stream(self, request: ChatRequest, start: float, short_cut: ShortCut) -> Chunks:
        metrics, begun = self.metrics, False
        try:
            async with (
                within_deadline(self.limits.deadline_s),
                self.admission.slot(),
                aclosing(self.served.stream(request, short_cut)) as chunks,  # type: ignore[type-var]
            ):
                async for chunk in chunks:
                    if not chunk["choices"]:
                        metrics.count_usage(chunk["usage"])
                        if not request.stream_options.include_usage:
                            continue
                    if not begun:
                        begun = True
                        metrics.first_token_s.observe(time.perf_counter() - start)
                    yield chunk
        except Exception:
            if begun:
                metrics.answer_s.observe(time.perf_counter() - start)
            raise
        metrics.answer_s.observe(time.perf_counter() - start)

    async def _complete(self, request: ChatRequest, start: float) -> dict[str, Any]:
        async with within_deadline(self.limits.deadline_s), self.admission.slot():
            answer = await self.served.complete(request)
        self.metrics.count_usage(answer["usage"])
        self.metrics.answer_s.observe(time.perf_counter() - start)
        return answer


def answer_headers(answer: Mapping[str, Any]) -> dict[str, str]:
    """What an answer, or the first chunk of a stream, says about route, calls and cost."""
    figures = answer.get("usage") or answer.get("toolwise") or {}
    headers = {}
    if figures.get("route"):
        headers["x-toolwise-route"] = quote(str(figures["route"]), safe=" /:,>")
    if "cost" in figures:
        headers["x-toolwise-cost"] = f"{figures['cost']:g}"
    if "calls" in figures:
        headers["x-toolwise-calls"] = json.dumps(figures["calls"])
    if "policy_version" in answer:
        headers["x-toolwise-weights"] = str(answer["policy_version"])
    return headers


def error_answer(fault: Exception) -> Any:
    status, body = error_response(fault)
    if status >= 500 and not isinstance(fault, BadRequestError):
        log.error("%s: %s", type(fault).__name__, fault, exc_info=fault)
    headers = dict(fault.headers) if isinstance(fault, BadRequestError) else {}
    if isinstance(fault, BadRequestError) and fault.close_connection:
        headers["connection"] = "close"
    return _json(body, status, headers)


def _json(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse(body, status_code=status, headers=headers)


class _CountResponses:
    """ASGI middleware: counts responses by path and status."""

    PATHS = frozenset({"/health", "/ready", "/metrics", "/v1/models", "/v1/chat/completions"})

    def __init__(self, app: Any, counts: Any) -> None:
        self.app, self.counts = app, counts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in self.PATHS else "other"
                self.counts[path, str(message["status"])] += 1
            await send(message)

        await self.app(scope, receive, counted if scope["type"] == "http" else send)


async def _cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any] | None:
    """The result of `work`; None if the client disconnects first: a request that is retried must not run twice."""
    completion = asyncio.create_task(work)
    gone = asyncio.create_task(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({completion, gone}, return_when=asyncio.FIRST_COMPLETED)
        return completion.result() if completion.done() else None
    finally:
        for task in (completion, gone):
            task.cancel()
        await asyncio.gather(completion, gone, return_exceptions=True)
