"""What goes wrong with an OpenAI-compatible server, by kind: whether to ask again is decided by these."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from toolwise.errors import ContextFullError, PolicyError
from toolwise.rewards.library.judge_endpoint import retry_after_s

MAX_ERROR_CHARS = 300
"""Characters of a server's own words that go into an error."""

# vLLM, SGLang and llama.cpp word it each in their own way, and change the wording; OpenAI has a code for it.
_CONTEXT_FULL = re.compile(
    r"context_length_exceeded|exceed_context_size|(?:context|model)(?:'s)? (?:length|size)|max_model_len", re.IGNORECASE
)


class ServerError(PolicyError):
    """A server that gave no answer to use. `kind` is what is counted: rate_limited, server_error, connect, dropped,
    timeout, bad_reply, too_big, redirect or refused."""

    def __init__(self, kind: str, message: str, *, retryable: bool = False, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.retryable = retryable
        """Whether asking once more may help."""
        self.wait_s = wait_s
        """How long the server asked us to wait."""


def error_from_response(status: int, headers: Mapping[str, str], raw: bytes) -> PolicyError:
    """What an answer other than 2xx is to us."""
    said, code = parse_error_body(raw)
    message = f"HTTP {status}" + (f": {said}" if said else "")
    if 300 <= status < 400:
        place = headers.get("location", "elsewhere")[:MAX_ERROR_CHARS]
        return ServerError("redirect", f"{message}; it redirects to {place}: give that as base_url if you trust it")
    if status in (400, 413, 422) and _CONTEXT_FULL.search(f"{code} {said}"):
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
    """The server's own message, on one line, and its code. Servers nest it differently; some send a page."""
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
