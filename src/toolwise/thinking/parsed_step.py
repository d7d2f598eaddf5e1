"""A parsed step of a rollout: its history, its sampled tokens and the reply they encode.

`token_spans` maps the text spans of level, thought and action to spans of the sampled tokens. Sampled ids may differ
from the tokenizer's own encoding of the text, so nothing is re-tokenised: prefixes of the ids are decoded and compared
with the full text.
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
    """Indices into a reply's token ids; empty if a part is missing."""

    level: range
    thought: range
    action: range
    head: range
    """Level and thought; white space and the action's opening tag lie between the head and the action."""


@dataclass(frozen=True, slots=True)
class ParsedStep:
    """One decision of a rollout."""

    rollout_id: str
    group_id: str
    index: int
    history: Sequence[int]
    """Prompt token ids."""
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    text: str
    reply: ParsedReply
    spans: TokenSpans
    kind: str | None = None
    """Kind of step, if the environment reports it: "easy", "hard", …"""

    @property
    def action_ids(self) -> Sequence[int]:
        return self.token_ids[self.spans.action.start : self.spans.action.stop]

    @property
    def tail_ids(self) -> Sequence[int]:
        """Tokens from the end of the head to the end of the action: its opening tag and the action."""
        return self.token_ids[len(self.spans.head) : self.spans.action.stop]

    @property
    def thinking_tokens(self) -> int:
        return len(self.spans.thought)

    @property
    def comparable(self) -> bool:
        """Whether the step has a level to compare and an action to score."""
        return self.reply.valid and len(self.spans.action) > 0


def token_spans(token_ids: Sequence[int], decode: Decode, reply: ParsedReply | None = None) -> TokenSpans:
    """Find the tokens of each part. `reply` is the result of `parse_reply` on the decoded text, if already known."""
    text = decode(token_ids)
    spans = (reply or parse_reply(text)).spans
    level, thought, action = (
        find_tokens(token_ids, span, decode, text=text) if span else range(0)
        for span in (spans.level, spans.thought, spans.action)
    )
    # A token that spans the border belongs to the action's side, so that the action can follow the head.
    return TokenSpans(level, thought, action, range(_first_ending_after(token_ids, spans.head[1], decode, text)))


def find_tokens(token_ids: Sequence[int], span: Span, decode: Decode, *, text: str | None = None) -> range:
    """The tokens that encode at least part of a character in `span` of their text.

    A character made of several tokens belongs to all of them; a token that crosses the border of the span is included.
    """
    full_text = decode(token_ids) if text is None else text
    start, end = span
    if end <= start:
        return range(0)
    first = _first_ending_after(token_ids, start, decode, full_text)
    last = bisect_left(range(len(token_ids)), end, key=lambda i: _settled_chars(token_ids, i, decode, full_text))
    return range(first, max(first, last))


def _first_ending_after(token_ids: Sequence[int], position: int, decode: Decode, text: str) -> int:
    """Index of the first token that ends after `position`, or encodes part of the character there."""
    index = bisect_left(
        range(len(token_ids)), position + 1, key=lambda i: _settled_chars(token_ids, i + 1, decode, text)
    )
    # Earlier tokens that end exactly at `position` may be the first bytes of the same character.
    while index > 0 and _splits_character(token_ids, index - 1, position, decode, text):
        index -= 1
    return index


def _splits_character(token_ids: Sequence[int], index: int, position: int, decode: Decode, text: str) -> bool:
    """Whether a token starts at `position` and ends in the middle of the character there."""
    unfinished = decode(token_ids[: index + 1]) != text[:position]
    settled = {_settled_chars(token_ids, count, decode, text) for count in (index, index + 1)}
    return unfinished and settled == {position}


def _settled_chars(token_ids: Sequence[int], count: int, decode: Decode, text: str) -> int:
    """Number of complete characters of the text that the first `count` tokens encode."""
    decoded = decode(token_ids[:count])
    if text.startswith(decoded):
        return len(decoded)
    return next((i for i, (a, b) in enumerate(zip(decoded, text, strict=False)) if a != b), len(text))
