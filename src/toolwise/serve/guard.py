"""Checks on a request before routing: framing, header size, host and content type."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from toolwise.serve.limits import ServerLimits
from toolwise.serve.request import BadRequestError

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z._-]+)(?::[0-9]{1,5})?")

Headers = list[tuple[bytes, bytes]]
App = Callable[[Any, Any, Any], Awaitable[None]]


class RequestGuard:
    """ASGI middleware. `refuse` turns a `BadRequestError` into a response."""

    def __init__(
        self, app: App, refuse: Callable[[BadRequestError], App], hosts: Iterable[str], limits: ServerLimits
    ) -> None:
        self.app = app
        self.refuse = refuse
        self.hosts = frozenset(host.lower() for host in (*LOOPBACK, *hosts))
        self.limits = limits

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
        if "*" in self.hosts:
            return
        name = match[1].lower()
        if name not in self.hosts and (server is None or name.strip("[]") != server[0]):
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
