"""Sends one request to an OpenAI-compatible server, with retries and bounded waits."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar

from toolwise.errors import RewardError

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

MAX_BODY_BYTES = 1_000_000
MAX_ERROR_BODY_BYTES = 200
_JSON = {"Content-Type": "application/json"}
_RETRYABLE_STATUSES = frozenset({408, 409, 425, 429})


class JudgeError(RewardError):
    """A judge gave no verdict. `kind` is the kind of the resulting `EvaluationFault`."""

    def __init__(self, kind: str, message: str, *, retryable: bool = False, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.retryable = retryable
        """Whether another attempt may help."""
        self.wait_s = wait_s
        """The delay that the server requested."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff up to a limit, with jitter so that requests that failed together are not retried together."""

    attempts: int = 5
    timeout_s: float = 60.0
    """Timeout of one attempt, from the first byte sent to the last byte read."""
    backoff_s: float = 1.0
    max_backoff_s: float = 30.0

    def wait_s(self, attempt: int, server_delay_s: float | None) -> float:
        if server_delay_s is not None:
            return min(server_delay_s, self.max_backoff_s)
        return min(self.backoff_s * 2.0 ** (attempt - 1), self.max_backoff_s) * random.uniform(0.5, 1.0)


async def post_with_retries(
    client: httpx.AsyncClient, url: str, body: Mapping[str, Any], retries: RetryPolicy, read: Callable[[str], T]
) -> T:
    """Posts `body` and returns `read(reply)`.

    Raises `JudgeError` after the last attempt, or at once if a retry would not help. `read` may raise one too: a model
    that rambled once may not do so again.
    """
    attempt = 0
    while True:
        attempt += 1
        try:
            return read(await _post_once(client, url, body, retries.timeout_s))
        except JudgeError as fault:
            if not fault.retryable or attempt >= retries.attempts:
                suffix = f" ({attempt} attempts)" if attempt > 1 else ""
                raise JudgeError(fault.kind, f"judge at {url}: {fault}{suffix}") from fault
            await asyncio.sleep(retries.wait_s(attempt, fault.wait_s))


async def _post_once(client: httpx.AsyncClient, url: str, body: Mapping[str, Any], timeout_s: float) -> str:
    import httpx

    content = json.dumps(body).encode()  # ASCII: a lone surrogate in a rollout must not fail here
    try:
        # Around everything: httpx's own timeouts restart with each byte from a slow server.
        async with asyncio.timeout(timeout_s), client.stream("POST", url, content=content, headers=_JSON) as response:
            raw = await _read(response)
    except (TimeoutError, httpx.TimeoutException):
        raise JudgeError("timeout", f"no complete reply within {timeout_s:g} s", retryable=True) from None
    except httpx.HTTPError as fault:  # refused, reset, or closed mid-body
        raise connection_failure(fault) from fault
    except httpx.InvalidURL as fault:
        raise JudgeError("exception", f"{type(fault).__name__}: {fault}") from fault
    if response.status_code != 200:
        raise _status_error(response, raw)
    return _reply_content(raw)


def connection_failure(fault: BaseException) -> JudgeError:
    """The `JudgeError` for a failed connection. A forbidden connection is not retried."""
    causes = [fault]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    message = f"{type(fault).__name__}: {fault}"
    if any(isinstance(cause, PermissionError) for cause in causes):
        return JudgeError("denied", f"{message}; no network access here: give the sandbox permissions=('network',)")
    return JudgeError("exception", message, retryable=True)


async def _read(response: httpx.Response) -> bytes:
    raw = bytearray()
    async for chunk in response.aiter_bytes():
        raw += chunk
        if response.status_code != 200 and len(raw) >= MAX_ERROR_BODY_BYTES:
            break
        if len(raw) > MAX_BODY_BYTES:
            raise JudgeError("too_big", f"the reply is larger than {MAX_BODY_BYTES} bytes")
    return bytes(raw)


def _status_error(response: httpx.Response, raw: bytes) -> JudgeError:
    status = response.status_code
    text = " ".join(raw[:MAX_ERROR_BODY_BYTES].decode(errors="replace").split())
    retryable = status in _RETRYABLE_STATUSES or status >= 500
    kind = "denied" if status in (401, 403) else "exception"
    return JudgeError(
        kind, f"HTTP {status}: {text}", retryable=retryable, wait_s=retry_after_s(response.headers.get("retry-after"))
    )


def retry_after_s(header: str | None) -> float | None:
    """The delay in a Retry-After header, given as seconds or as a date."""
    if header is None:
        return None
    if header.strip().isascii() and header.strip().isdigit():
        return float(header)
    try:
        when = parsedate_to_datetime(header)
    except ValueError:
        return None
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())


def _reply_content(raw: bytes) -> str:
    try:
        content = json.loads(raw)["choices"][0]["message"]["content"]
    except (ValueError, RecursionError):  # a truncated body may be complete next time
        raise JudgeError("bad_type", f"the reply is not JSON: {raw[:80]!r}", retryable=True) from None
    except (KeyError, IndexError, TypeError):
        raise JudgeError(
            "bad_type", f"the reply has no choices[0].message.content: {raw[:80]!r}", retryable=True
        ) from None
    if not isinstance(content, str):
        raise JudgeError("bad_type", f"the reply's content is a {type(content).__name__}, not text", retryable=True)
    return content
