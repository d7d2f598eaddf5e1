"""Requests to an OpenAI-compatible server, with retries within one deadline, and metrics.

Waits use the running loop's clock, so that tests can simulate hours of failures (`toolwise.testing.virtual_time`).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from toolwise.errors import ConfigError, ContextFullError, PolicyError
from toolwise.protocols import Metrics
from toolwise.remote.server_errors import ServerError, connection_error, describe_error, error_from_response

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

_MAX_ERROR_BYTES = 16_384
_JSON = {"Content-Type": "application/json", "Accept": "application/json"}


class Endpoint:
    """POSTs to `url`. `timeout_s` limits one attempt, from the first byte sent to the last byte read; `deadline_s`
    limits everything: waiting for a free slot, all attempts, and the delays between them.

    `retries_when_down`: whether requests are still retried after one has used up its retries and none has succeeded
    since (too many requests at a time do not count). False spares those who can do without the server the wait."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 120.0,
        deadline_s: float = 600.0,
        max_retries: int = 5,
        backoff_s: float = 0.5,
        max_backoff_s: float = 30.0,
        max_concurrent: int = 256,
        max_reply_bytes: int = 64_000_000,
        seed: int = 0,
        retries_when_down: bool = True,
        client: httpx.AsyncClient | None = None,
    ) -> None:
        self.url = _validate_url(url)
        self.timeout_s = timeout_s
        self.deadline_s = deadline_s
        self.max_retries = max_retries
        self.backoff_s = backoff_s
        self.max_backoff_s = max_backoff_s
        self.max_concurrent = max_concurrent
        self.max_reply_bytes = max_reply_bytes
        self._headers = _JSON | _authorization(api_key)
        self._api_key = api_key
        self.retries_when_down = retries_when_down
        self._down = False
        """Whether a request has used up its retries, and none has succeeded since."""
        self._rng = random.Random(seed)
        self._external_client = client
        self._open: tuple[asyncio.AbstractEventLoop, httpx.AsyncClient, asyncio.Semaphore] | None = None
        self._counts: Counter[str] = Counter()
        self.gate: AbstractAsyncContextManager[None] = nullcontext()
        """Around each attempt; waiting at it counts towards `deadline_s` alone."""

    async def ask(self, body: Mapping[str, Any], read: Callable[[Any, Mapping[str, str]], T]) -> T:
        """Send `body` and return `read(json, headers)` of the reply. `read` may raise a retryable `ServerError`: a
        server that returned nonsense once may not do so again."""
        content = json.dumps(body).encode()  # as ASCII: a lone surrogate in a rollout must not fail here
        clock = asyncio.get_running_loop().time
        deadline = clock() + self.deadline_s
        attempts = 0
        while True:
            attempts += 1
            self._counts["requests"] += 1
            try:
                raw, headers = await self._send_once(content, deadline)
                reply = read(_parse_json(raw, headers), headers)
                self._down = False
                return reply
            except ContextFullError as full:
                self._counts["context_full"] += 1
                raise ContextFullError(self._error_message(str(full), attempts)) from None
            except ServerError as fault:
                pause_s = self._retry_delay_s(attempts, fault.wait_s)
                busy = fault.kind == "rate_limited"
                hopeless = self._down and not self.retries_when_down and not busy
                exhausted = attempts > self.max_retries or clock() + pause_s >= deadline
                if not fault.retryable or exhausted or hopeless:
                    self._down |= fault.retryable and not busy
                    self._counts[f"failures/{fault.kind}"] += 1
                    message = self._error_message(str(fault), attempts)
                    raise ServerError(fault.kind, message, denied=fault.denied) from fault
                self._counts[f"retries/{fault.kind}"] += 1
            await asyncio.sleep(pause_s)

    async def _send_once(self, content: bytes, deadline: float) -> tuple[bytes, Mapping[str, str]]:
        import httpx

        client, slots = self._connections()
        left_s = max(0.0, deadline - asyncio.get_running_loop().time())
        try:
            # Around everything: httpx's own timeouts restart with each byte from a slow server.
            async with (
                asyncio.timeout(left_s),
                slots,
                self.gate,
                asyncio.timeout(self.timeout_s),
                client.stream("POST", self.url, content=content, headers=self._headers) as response,
            ):
                raw = await self._read(response)
        except (TimeoutError, httpx.TimeoutException):
            raise ServerError(
                "timeout", f"no complete reply within {min(left_s, self.timeout_s):g} s", retryable=True
            ) from None
        except httpx.ConnectError as fault:
            raise connection_error(fault) from fault
        except httpx.DecodingError as fault:
            raise ServerError(
                "bad_reply", f"the reply cannot be decompressed: {describe_error(fault)}", retryable=True
            ) from fault
        except httpx.HTTPError as fault:  # reset, or closed in the middle of a body
            raise ServerError("dropped", f"the connection broke: {describe_error(fault)}", retryable=True) from fault
        if not response.is_success:
            raise error_from_response(response.status_code, response.headers, raw)
        return raw, response.headers

    async def _read(self, response: httpx.Response) -> bytes:
        raw = bytearray()
        async for chunk in response.aiter_bytes():
            raw += chunk
            if not response.is_success and len(raw) >= _MAX_ERROR_BYTES:
                break
            if len(raw) > self.max_reply_bytes:
                raise ServerError("too_big", f"the reply is larger than {self.max_reply_bytes} bytes")
        return bytes(raw)

    def _connections(self) -> tuple[httpx.AsyncClient, asyncio.Semaphore]:
        """Connections and semaphores belong to an event loop, so a new loop gets new ones."""
        import httpx

        loop = asyncio.get_running_loop()
        if self._open is None or self._open[0] is not loop:
            limits = httpx.Limits(
                max_connections=self.max_concurrent, max_keepalive_connections=self.max_concurrent, keepalive_expiry=4.0
            )
            client = self._external_client or httpx.AsyncClient(timeout=None, limits=limits)
            self._open = loop, client, asyncio.Semaphore(self.max_concurrent)
        return self._open[1], self._open[2]

    def _retry_delay_s(self, attempts: int, server_delay_s: float | None) -> float:
        """Exponential backoff up to a limit, with jitter, so that requests that failed together do not retry together.
        Never shorter than the server requested."""
        backoff_s = min(self.backoff_s * 2.0 ** (attempts - 1), self.max_backoff_s) * self._rng.uniform(0.5, 1.0)
        return backoff_s if server_delay_s is None else server_delay_s + min(backoff_s, self.backoff_s)

    def _error_message(self, problem: str, attempts: int) -> str:
        if self._api_key:
            problem = problem.replace(self._api_key, "…")  # some servers echo the key they reject
        return f"server at {_without_login(self.url)}: {problem}" + (f" ({attempts} attempts)" if attempts > 1 else "")

    def metrics(self) -> Metrics:
        """Total counts: requests (attempts), retries and failures, also by kind, and full contexts."""
        totals = {
            f"policy/{event}": float(sum(n for name, n in self._counts.items() if name.startswith(f"{event}/")))
            for event in ("retries", "failures")
        }
        return totals | {f"policy/{name}": float(self._counts[name]) for name in ("requests", *self._counts)}

    async def aclose(self) -> None:
        """Close the connections, unless the client was given by the caller."""
        opened, self._open = self._open, None
        if opened is not None and self._external_client is None and opened[0] is asyncio.get_running_loop():
            await opened[1].aclose()


def _parse_json(raw: bytes, headers: Mapping[str, str]) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):  # a truncated or garbled reply may be complete the next time
        kind = headers.get("content-type", "no content type")
        raise ServerError("bad_reply", f"the reply ({kind}) is not JSON: {raw[:80]!r}", retryable=True) from None


def _validate_url(url: str) -> str:
    import httpx

    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as fault:
        raise PolicyError(f"base_url {url!r} is not a URL ({fault}); give one like http://localhost:8000/v1") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise PolicyError(f"base_url {url!r} is not an http URL; give one like http://localhost:8000/v1")
    return url


def _without_login(url: str) -> str:
    """For messages, which are stored and shown: without a name and a password."""
    import httpx

    return str(httpx.URL(url).copy_with(userinfo=b""))


def read_api_key(variable: str, option: str) -> str | None:
    """The key in an environment variable; None if `option`, which names the variable, is not set."""
    key = os.environ.get(variable) if variable else None
    if variable and not key:
        raise ConfigError(f"{option}: the environment variable {variable} is not set: set it, or leave {option} out")
    return key


def _authorization(api_key: str | None) -> dict[str, str]:
    if api_key is None:
        return {}
    if not api_key.isascii() or not api_key.isprintable() or api_key != api_key.strip() or not api_key:
        raise PolicyError(
            "api_key contains characters that are not allowed in an HTTP header: does it end in a newline?"
        )
    return {"Authorization": f"Bearer {api_key}"}
