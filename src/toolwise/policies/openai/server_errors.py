"""Errors of an OpenAI-compatible server, by kind, and whether to retry them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from toolwise.errors import ContextFullError, PolicyError
from toolwise.rewards.library.judge_endpoint import retry_after_s

MAX_ERROR_CHARS = 300
"""Maximum characters of a server's message in an error."""

# vLLM, SGLang and llama.cpp each word this differently, and change the wording; OpenAI has an error code for it.
_CONTEXT_FULL = re.compile(
    r"context_length_exceeded|exceed_context_size|(?:context|model)(?:'s)? (?:length|size)|max_model_len", re.IGNORECASE
)


class ServerError(PolicyError):
    """The server returned no usable reply. Metrics count errors by `kind`: rate_limited, server_error, connect,
    dropped, timeout, bad_reply, too_big, redirect or refused."""

    def __init__(self, kind: str, message: str, *, retryable: bool = False, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.retryable = retryable
        """Whether retrying may help."""
        self.wait_s = wait_s
        """Delay that the server requested before a retry."""


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
    if status >= 500:
        return ServerError("server_error", message, retryable=True, wait_s=wait_s)
    return ServerError("refused", message)


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
