"""Limits of the server: what one client can take from the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toolwise.messages import Message
from toolwise.serve.request import BadRequestError, ChatRequest

MAX_REQUEST_BODY_BYTES = 32_000_000
MIN_REQUEST_BODY_BYTES = 1_000_000
MAX_CONTEXT_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Each timeout covers a whole phase: a slow trickle of bytes does not extend it."""

    active: int = 512
    """Requests that are answered at a time."""
    queued: int = 512
    """Requests that wait; more get a 429."""
    deadline_s: float = 600.0
    """Time for an answer, waiting included; 504 after it, or an error in a stream that has begun."""
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


@dataclass(frozen=True, slots=True)
class TextLimits:
    """Upper bounds on text that can fit the context, without tokenising it."""

    prompt_chars: int
    """For the rendered prompt: no token covers more characters than the longest entry of the vocabulary."""
    body_bytes: int

    @classmethod
    def of(cls, tokenizer: Any, max_context: int) -> TextLimits:
        longest = max((len(text) for text in tokenizer.get_vocab()), default=1)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        # A normaliser may merge characters before the lookup: at most three (Hangul), so a factor of four is safe.
        joined = 4 if backend is None or backend.normalizer is not None else 1
        chars = min(max_context, MAX_CONTEXT_TOKENS) * max(longest, 16) * joined
        # JSON may escape a character as six bytes, and templates drop some of their input.
        return cls(chars, min(MIN_REQUEST_BODY_BYTES + 6 * chars, MAX_REQUEST_BODY_BYTES))


def chars_of(messages: Sequence[Message]) -> int:
    """Characters of all texts in a conversation, without rendering it; other values count as one."""
    total, left = 0, list[Any]()
    for message in messages:
        left += [message.content, message.reasoning_content]
        left += [part for call in message.tool_calls or () for part in (call.name, call.arguments)]
    while left:  # arguments may be nested deeply
        value = left.pop()
        total += len(value) if isinstance(value, str) else value is not None
        if isinstance(value, dict):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            left += value
    return total


def check_chars(chars: int, limits: TextLimits, max_context: int) -> None:
    """Raise if a text of so many characters cannot fit the model's context."""
    if chars > limits.prompt_chars:
        raise BadRequestError(
            f"a prompt of {chars} characters cannot fit the model's {max_context} tokens: shorten it",
            param="messages",
            code="context_length_exceeded",
        )


def check_model(request: ChatRequest, name: str) -> None:
    if request.model != name:
        raise BadRequestError(
            f"model {request.model!r} not found; available: {name}", param="model", code="model_not_found", status=404
        )


def check_new_tokens(request: ChatRequest, limit: int | None) -> int | None:
    """The length that a request asks for; raises if the server does not allow it."""
    wanted = request.max_completion_tokens or request.max_tokens
    if limit is not None and wanted is not None and wanted > limit:
        raise BadRequestError(f"max_tokens is {wanted}, but this server allows at most {limit}", param="max_tokens")
    return wanted or limit
