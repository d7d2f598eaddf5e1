"""Which sampled tokens wrote the level, the thought and the action: spans of text -> indices of tokens.

Sampled ids need not be what a tokenizer would make of their text, so nothing is tokenised anew: beginnings of the ids
are decoded, and compared with the whole.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from toolwise.thinking.reply import ParsedReply, Span, parse_reply

Decode = Callable[[Sequence[int]], str]
"""Such as `ChatTokenizer.decode`."""


@dataclass(frozen=True, slots=True)
class TokenSpans:
    """Indices into a reply's token ids; empty where there is no such part."""

    level: range
    thought: range
    action: range
    head: range
    """Level and thought; white space and the opening tag of the action lie between it and the action."""


def token_spans(token_ids: Sequence[int], decode: Decode, reading: ParsedReply | None = None) -> TokenSpans:
    """Where the parts of a reply are among its tokens. `reading` is what `parse_reply` made of the text they decode
    to."""
    text = decode(token_ids)
    found = (reading or parse_reply(text)).spans
    level, thought, action = (
        find_tokens(token_ids, span, decode, text=text) if span else range(0)
        for span in (found.level, found.thought, found.action)
    )
    # A token across the border belongs to the action's side: the head must be a context that the action can follow.
    head = range(_first_ending_after(token_ids, found.head[1], decode, text))
    return TokenSpans(level, thought, action, head)


def find_tokens(token_ids: Sequence[int], span: Span, decode: Decode, *, text: str | None = None) -> range:
    """The tokens that write at least a part of a character in `span` of their text.

    A character that takes several tokens belongs to all of them; a token that reaches over the border of the span is
    in it.
    """
    whole = decode(token_ids) if text is None else text
    start, end = span
    if end <= start:
        return range(0)
    first = _first_ending_after(token_ids, start, decode, whole)
    last = bisect_left(range(len(token_ids)), end, key=lambda i: _settled_chars(token_ids, i, decode, whole))
    return range(first, max(first, last))


def _first_ending_after(token_ids: Sequence[int], place: int, decode: Decode, whole: str) -> int:
    """The first token that goes on beyond `place`, or writes a part of the character there."""
    index = bisect_left(range(len(token_ids)), place + 1, key=lambda i: _settled_chars(token_ids, i + 1, decode, whole))
    # The tokens before it that end at `place` and not beyond may be the first bytes of the same character.
    while index > 0 and _splits_character(token_ids, index - 1, place, decode, whole):
        index -= 1
    return index


def _splits_character(token_ids: Sequence[int], index: int, place: int, decode: Decode, whole: str) -> bool:
    """Whether a token begins at `place` and ends in the middle of the character there."""
    unfinished = decode(token_ids[: index + 1]) != whole[:place]
    settled = {_settled_chars(token_ids, count, decode, whole) for count in (index, index + 1)}
    return unfinished and settled == {place}


def _settled_chars(token_ids: Sequence[int], count: int, decode: Decode, whole: str) -> int:
    """How many characters of the text the first `count` tokens have settled. A character cut in half is not one."""
    settled = decode(token_ids[:count])
    if whole.startswith(settled):
        return len(settled)
    return next((i for i, (a, b) in enumerate(zip(settled, whole, strict=False)) if a != b), len(whole))
