"""Checks on a request before it is routed: headers, host, key, content type; and the reader of its body."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from toolwise.errors import ConfigError
from toolwise.serve.limits import ServerLimits
from toolwise.serve.request import BadRequestError

if TYPE_CHECKING:
    from starlette.requests import Request

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
OPEN_PATHS = ("/health", "/ready")
"""Paths that need no key: they say no more than whether the server works."""
MIN_KEY_CHARS = 16
MAX_TOTAL_BODY_BYTES = 256_000_000
"""Total size of the request bodies in memory, over all connections."""
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z._-]+)(?::[0-9]{1,5})?")

Headers = list[tuple[bytes, bytes]]
App = Callable[[Any, Any, Any], Awaitable[None]]


class ApiKeys:
    """The bearer keys that a server accepts. Only their hashes are kept."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        for key in keys:
            if len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError(
                    f"an API key needs at least {MIN_KEY_CHARS} printable ASCII characters without spaces: make one "
                    "with python -c 'import secrets; print(secrets.token_urlsafe(32))'"
                )
        self._hashes = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def check(self, headers: Headers) -> None:
        values = _values(headers, b"authorization")
        scheme, _, key = (values[0] if len(values) == 1 else "").partition(" ")
        sent = hashlib.sha256(key.strip().encode("latin-1")).digest()
        matches = [hmac.compare_digest(sent, known) for known in self._hashes]
        if scheme.lower() != "bearer" or not any(matches):
            raise BadRequestError(
                "the API key is missing or wrong: send Authorization: Bearer KEY",
                code="invalid_api_key",
                status=401,
                headers={"WWW-Authenticate": "Bearer"},
            )


@dataclass(frozen=True, slots=True)
class RequestGuard:
    """ASGI middleware: checks on a request before routing. `refuse` turns a `BadRequestError` into a response."""

    app: App
    refuse: Callable[[BadRequestError], App]
    hosts: frozenset[str]
    limits: ServerLimits
    keys: ApiKeys = field(default_factory=ApiKeys)
    hint: str = "add it with --allow-host, or build_app(…, hosts=[…])"
    """How to get access under another name."""

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
        if self.keys and scope["path"] not in OPEN_PATHS:
            self.keys.check(headers)
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
                f"host {name!r:.80} is not allowed: {self.hint}",
                status=403,
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
