"""One choice of a completion while it is sampled: tokens become pieces of text and, in the end, tool calls.

Joined, the pieces are the message of the completion that is not streamed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolwise.rollout.parsers import reasoning_of
from toolwise.rollout.parsers.json_calls import ParsedReply
from toolwise.rollout.parsers.stream import CallStream, ContentPiece, StreamEvent
from toolwise.rollout.text_stream import TextStream


class StopFilter:
    """Passes text on up to the first stop string. Holds back what may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.stopped = False
        self._held = ""

    def feed(self, piece: str) -> str:
        if self.stopped:
            return ""
        text = self._held + piece
        cut = cut_at_stop(text, self.stops)
        if cut is not None:
            self.stopped, self._held = True, ""
            return cut
        held = max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


def cut_at_stop(text: str, stops: Sequence[str]) -> str | None:
    """The text before the first stop string; None if it has none."""
    found = [position for stop in stops if (position := text.find(stop)) >= 0]
    return text[: min(found)] if found else None


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is the start of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


@dataclass(slots=True)
class ChoiceStream:
    """Turns the tokens of a choice into deltas."""

    decode: Callable[[Sequence[int]], str]
    stops: Sequence[str] = ()
    call_stream: CallStream | None = None
    """Reads calls; None: the reply is text."""
    keep_calls: int | None = None
    """How many calls to keep; None: all."""
    sent: str = ""
    _filter: StopFilter = field(init=False)
    _text: TextStream = field(init=False)
    _pieces: list[str] = field(init=False, default_factory=list)
    _called: bool = False
    _later: str = ""
    """Content after the first call."""

    def __post_init__(self) -> None:
        self._filter = StopFilter(self.stops)
        self._text = TextStream(self.decode, self._pieces.append)

    def feed(self, token_ids: Sequence[int]) -> str:
        """The content that new tokens make certain."""
        self._text.add(token_ids)
        return self._content()

    def finish(self, text: str, finish_reason: str) -> dict[str, Any]:
        """What is left of the message: content, reasoning and calls. `text` is the whole reply."""
        self._text.finish(text)
        content = self._content()
        rest = "" if self._filter.stopped else self._filter.finish()
        if self.call_stream is None:
            content += rest
            self.sent += rest
            return {"content": content} if content else {}
        content += self._read(self.call_stream.feed(rest))
        if finish_reason == "length":  # calls in a reply that was cut off were not made: they are text
            reply = text.lstrip() if text.lstrip().startswith(self.sent) else self.sent
            content, self.sent = content + reply[len(self.sent) :], reply
            return {"content": content} if content else {}
        content += self._read(self.call_stream.finish()) + self._later
        assert self.call_stream.reply is not None
        return ({"content": content} if content else {}) | reply_fields(self.call_stream.reply, self.keep_calls)

    def _content(self) -> str:
        text = "".join(map(self._filter.feed, self._pieces))
        self._pieces.clear()
        if self.call_stream is not None:
            return self._read(self.call_stream.feed(text))
        self.sent += text
        return text

    def _read(self, events: Sequence[StreamEvent]) -> str:
        """The content before the first call. What follows waits for the end: a reply that is cut off is all text."""
        text = ""
        for event in events:
            if not isinstance(event, ContentPiece):
                self._called = True
            elif self._called:
                self._later += event.text
            else:
                text += event.text
        self.sent += text
        return text


def reply_fields(reply: ParsedReply, keep_calls: int | None = None) -> dict[str, Any]:
    """Reasoning and calls of a reply, as fields of an OpenAI message."""
    _, calls = reply
    reasoning = reasoning_of(reply)
    fields: dict[str, Any] = {"reasoning_content": reasoning} if reasoning else {}
    return fields | ({"tool_calls": [call.to_openai() for call in calls[:keep_calls]]} if calls else {})
