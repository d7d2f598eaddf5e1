"""Whether a reply has come to a text that ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_MAX_CHARACTER_TOKENS = 8
"""Extra tokens to decode beyond the bytes of the longest stop string: one character can take several tokens."""


def has_stop_string(
    decode: Callable[[Sequence[int]], str], token_ids: Sequence[int], stop_strings: Sequence[str], start: int = 0
) -> bool:
    """Whether the last token has completed one of `stop_strings` in the reply, which begins at `start`. Asked after
    every token, so that the end of the reply is enough."""
    if not stop_strings:
        return False
    longest = max(len(stop.encode()) for stop in stop_strings) + _MAX_CHARACTER_TOKENS
    text = decode(token_ids[max(start, len(token_ids) - longest) :])
    return any(stop in text for stop in stop_strings)
