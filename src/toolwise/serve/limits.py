"""Server limits: time, connections, bytes, and text that can fit the model's context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MAX_REQUEST_BODY_BYTES = 32_000_000
MIN_REQUEST_BODY_BYTES = 1_000_000
MAX_TOTAL_BODY_BYTES = 256_000_000
"""Total size of the request bodies in memory, over all connections."""
MAX_CONTEXT_TOKENS = 1 << 20


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
