"""What one client may take of the server: time, connections, bytes, and text that can fit the model's context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MAX_REQUEST_BODY_BYTES = 32_000_000
MIN_REQUEST_BODY_BYTES = 1_000_000
MAX_TOTAL_BODY_BYTES = 256_000_000
"""Bytes of request bodies held at once, over all connections."""
MAX_CONTEXT_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Seconds are counted from the beginning of each phase: bytes that drip in do not put the end off."""

    connections: int = 512
    head_s: float = 10.0
    """Until the request line and all headers have come, from the connection or the last answer on."""
    body_s: float = 60.0
    write_s: float = 30.0
    """How long an answer may wait for a client that does not read it."""
    keep_alive_s: float = 5.0
    drain_s: float = 5.0
    """How long the rest of a refused body is read and thrown away, so that its sender can read the refusal."""
    head_bytes: int = 32_768
    headers: int = 100


@dataclass(frozen=True, slots=True)
class TextLimits:
    """Upper bounds of what can fit a context, known before anything is tokenised."""

    prompt_chars: int
    """Of the rendered prompt: a token stands for no more characters than the longest one in the vocabulary has."""
    body_bytes: int

    @classmethod
    def of(cls, tokenizer: Any, max_context: int) -> TextLimits:
        longest = max((len(text) for text in tokenizer.get_vocab()), default=1)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        # A normaliser joins characters before they are looked up: three at most (Hangul), so four are enough.
        joined = 4 if backend is None or backend.normalizer is not None else 1
        chars = min(max_context, MAX_CONTEXT_TOKENS) * max(longest, 16) * joined
        # JSON may spell a character in six bytes; and templates leave out some of what they are given.
        return cls(chars, min(MIN_REQUEST_BODY_BYTES + 6 * chars, MAX_REQUEST_BODY_BYTES))
