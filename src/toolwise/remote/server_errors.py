"""Errors of an OpenAI-compatible server, by kind, and whether to retry them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from toolwise.errors import ContextFullError, PolicyError

MAX_ERROR_CHARS = 300
"""Maximum characters of a server's message in an error."""

# vLLM, SGLang and llama.cpp each word this differently, and change the wording; OpenAI has an error code for it.
_CONTEXT_FULL = re.compile(
    r"context_length_exceeded|exceed_context_size|(?:context|model)(?:'s)? (?:length|size)|max_model_len", re.IGNORECASE
)


class ServerError(PolicyError):
    """The server returned no usable reply. Metrics count errors by `kind`: rate_limited, server_error, connect,
    dropped, timeout, bad_reply, too_big, redirect or refused."""

    def __init__(
        self, kind: str, message: str, *, retryable: bool = False, wait_s: float | None = None, denied: bool = False
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.retryable = retryable
        """Whether retrying may help."""
        self.wait_s = wait_s
        """Delay that the server requested before a retry."""
        self.denied = denied
        """Whether access is forbidden: by the server, or by a sandbox without a network."""


def error_from_response(status: int, headers: Mapping[str, str], raw: bytes) -> PolicyError:
    """The error for a response other than 2xx."""
    detail, code = parse_error_body(raw)
    message = f"HTTP {status}" + (f": {detail}" if detail else "")
    if 300 <= status < 400:
        location = headers.get("location", "elsewhere")[:MAX_ERROR_CHARS]
        return ServerError("redirect", f"{message}; it redirects to {location}: use that as base_url if you trust it")
    if status in (400, 413, 422) and _CONTEXT_FULL.search(f"{code} {detail}"):
        return ContextFullError(message)
    wait_s = retry_after_s(headers.get("retry-after"))
    if status == 429:
        return ServerError("rate_limited", message, retryable=True, wait_s=wait_s)
    if status == 408:
        return ServerError("timeout", message, retryable=True, wait_s=wait_s)
    if status >= 500 or status in (409, 425):
        return ServerError("server_error", message, retryable=True, wait_s=wait_s)
    return ServerError("refused", message, denied=status in (401, 403))


def connection_error(fault: BaseException) -> ServerError:
    """The error for a connection that could not be made. A forbidden one is not retried."""
    causes = [fault]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    message = f"no connection: {describe_error(fault)}"
    if any(isinstance(cause, PermissionError) for cause in causes):
        hint = "no network access here: give the sandbox permissions=('network',)"
        return ServerError("connect", f"{message}; {hint}", denied=True)
    return ServerError("connect", message, retryable=True)


def describe_error(fault: BaseException) -> str:
    return f"{type(fault).__name__}: {' '.join(str(fault).split())}".rstrip(": ")


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


def parse_error_body(raw: bytes) -> tuple[str, str]:
    """The server's message, on one line, and its error code. Servers nest it differently; some send an HTML page."""
    text = raw.decode(errors="replace")
    code = ""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        error = value.get("error", value)
        if isinstance(error, dict):
            code = " ".join(str(error[key]) for key in ("code", "type") if isinstance(error.get(key), str))
            error = error.get("message") or error.get("detail") or text
        text = error if isinstance(error, str) else json.dumps(error)
    line = "".join(c if c.isprintable() else " " for c in text)
    line = " ".join(line.split())
    return (line if len(line) <= MAX_ERROR_CHARS else f"{line[:MAX_ERROR_CHARS]}…"), code
