"""The ASGI app: checks on a request before routing, routes, body limits, OpenAI-style errors, and cancellation when a
client disconnects."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolwise.errors import MissingExtraError
from toolwise.serve.chat import ServedModel, completion_events, error_response
from toolwise.serve.request import BadRequestError

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

log = logging.getLogger("toolwise.serve")
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z._-]+)(?::[0-9]{1,5})?")

Headers = list[tuple[bytes, bytes]]
App = Callable[[Any, Any, Any], Awaitable[None]]
MAX_TOTAL_BODY_BYTES = 256_000_000
"""Total size of the request bodies in memory, over all connections."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits per connection. Each timeout covers a whole phase: a slow trickle of bytes does not extend it."""

    connections: int = 512
    head_s: float = 10.0
    """Time for the request line and all headers, from the connection or the previous response."""
    body_s: float = 60.0
    write_s: float = 30.0
    """How long a response may wait for a client that does not read it."""
    keep_alive_s: float = 5.0
    drain_s: float = 5.0
    """How long the rest of a rejected body is read and discarded, so that the sender can read the error."""
    head_bytes: int = 32_768
    headers: int = 100


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

    model = {"id": served.name, "object": "model", "created": int(time.time()), "owned_by": "toolwise"}
    limits = limits or ServerLimits()
    names = frozenset(host.lower() for host in (*LOOPBACK, *hosts))
    bodies = BodyReader(served.limits.body_bytes, limits.body_s)

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(request: Request) -> Response:
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
        closes = isinstance(fault, BadRequestError) and fault.close_connection
        return JSONResponse(body, status_code=status, headers={"connection": "close"} if closes else None)

    async def http_error(request: Request, fault: Exception) -> Response:
        assert isinstance(fault, HTTPException)
        _, body = error_response(BadRequestError(str(fault.detail), status=fault.status_code))
        return JSONResponse(body, status_code=fault.status_code, headers=fault.headers)

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", models),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        ],
        middleware=[Middleware(RequestGuard, refuse=error_answer, hosts=names, limits=limits)],
        exception_handlers={HTTPException: http_error},
    )


@dataclass(frozen=True, slots=True)
class RequestGuard:
    """ASGI middleware: checks on a request before routing. `refuse` turns a `BadRequestError` into a response."""

    app: App
    refuse: Callable[[BadRequestError], App]
    hosts: frozenset[str]
    limits: ServerLimits

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        app = self.app
        if scope["type"] == "http":
            try:
                self.check(scope)
            except BadRequestError as fault:
                app = self.refuse(fault)
        await app(scope, receive, send)

    def check(self, scope: Mapping[str, Any]) -> None:
        headers: Headers = scope["headers"]
        size = sum(len(name) + len(value) for name, value in headers)
        size += len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
        if len(headers) > self.limits.headers or size > self.limits.head_bytes:
            raise BadRequestError(
                f"more than {self.limits.headers} headers, or headers larger than {self.limits.head_bytes} bytes",
                status=431,
                close_connection=True,
            )
        if scope["http_version"] not in ("1.0", "1.1"):
            raise BadRequestError("unsupported HTTP version: use HTTP/1.1", status=505, close_connection=True)
        names = [name for name, _ in headers]
        if b"transfer-encoding" in names and (b"content-length" in names or scope["http_version"] == "1.0"):
            raise BadRequestError(
                "Transfer-Encoding and Content-Length contradict each other: send one", close_connection=True
            )
        self._check_host(_values(headers, b"host"), scope.get("server"))
        if scope["method"] in ("POST", "PUT", "PATCH"):
            _check_content(headers)

    def _check_host(self, hosts: list[str], server: tuple[str, int | None] | None) -> None:
        """Accept only known host names: this stops DNS rebinding, where an attacker's name resolves to this machine."""
        match = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if match is None:
            raise BadRequestError("a request needs one Host header, such as localhost:8000", close_connection=True)
        name = match[1].lower()
        bound = server is not None and name.strip("[]") == server[0]
        if not bound and self.hosts.isdisjoint({"*", name}):
            raise BadRequestError(
                f"host {name!r:.80} is not allowed: add the name to build_app(…, hosts=[…])", status=403
            )


def _check_content(headers: Headers) -> None:
    kinds, codings = _values(headers, b"content-type"), _values(headers, b"content-encoding")
    kind, _, parameters = (kinds[0] if len(kinds) == 1 else "").lower().partition(";")
    charset = re.sub(r'[\s"]', "", parameters)
    if kind.strip() != "application/json" or charset not in ("", "charset=utf-8", "charset=utf8"):
        raise BadRequestError("the body must be JSON: send Content-Type: application/json", status=415)
    if any(coding.strip().lower() != "identity" for coding in codings):
        raise BadRequestError("the body must not be compressed: omit Content-Encoding", status=415)


def _values(headers: Headers, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in headers if key == name]


@dataclass(slots=True)
class BodyReader:
    """Reads request bodies: limits the size and time of each, and the total size of all at once."""

    max_bytes: int
    body_s: float
    _held: int = 0

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
