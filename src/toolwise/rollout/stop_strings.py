"""Whether a reply has come to a text that ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_MAX_CHARACTER_TOKENS = 8
"""Extra tokens to decode beyond the bytes of the longest stop string: one character can take several tokens."""
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def has_stop_string(
    decode: Callable[[Sequence[int]], str],
    token_ids: Sequence[int],
    new: Sequence[int],
    stop_strings: Sequence[str],
    start: int = 0,
) -> bool:
    """Whether the last token has completed one of `stop_strings` in the reply: `token_ids` from `start` on, and then
    `new`. Asked after every token, so that the end of the reply is enough."""
    if not stop_strings:
        return False
    count = max(len(stop.encode()) for stop in stop_strings) + _MAX_CHARACTER_TOKENS
    first = max(start, len(token_ids) + len(new) - count)
    text = decode([*token_ids[first:], *new[-count:]])
    # A character whose first bytes are cut off, or whose last bytes are still to come, is not that of the reply.
    text = (text if first == start else text.lstrip(_INCOMPLETE)).rstrip(_INCOMPLETE)
    if any(stop in text for stop in stop_strings):
        return True
    return 0 < start == first and any(stop in _with_space(decode, token_ids, new, start, text) for stop in stop_strings)


def _with_space(
    decode: Callable[[Sequence[int]], str], token_ids: Sequence[int], new: Sequence[int], start: int, text: str
) -> str:
    """The whole of a reply, which is `text`, with the space that some tokenizers write before every word but the first:
    it is there after the last token of the prompt."""
    before = decode(token_ids[start - 1 : start])
    after = decode([*token_ids[start - 1 :], *new])
    return f" {text}" if after.startswith(f"{before} {text}") else text
