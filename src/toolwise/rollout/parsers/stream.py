"""Reads a reply piece by piece, as it is written: text that is certainly content, names of calls, finished calls.

In the end it gives exactly what parsing the whole text gives; what was reported before never changes. Text is held back
from the first place where a mark may begin. A block is read by the format's own reader once it may be complete.

The work is linear in the text: a block is read again only when a mark arrives that may complete it, and all attempts
together read at most `_MAX_REREADING` times what has arrived. Beyond that, calls are reported later, at worst at the
end.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from toolwise.messages import ToolCall
from toolwise.rollout.parsers.argument_stream import ArgumentStream
from toolwise.rollout.parsers.blocks import BlockFormat
from toolwise.rollout.parsers.json_calls import (
    CLOSING,
    OPENING,
    THOUGHT_CLOSINGS,
    THOUGHT_OPENINGS,
    NeedMoreTextError,
    ParsedReply,
    PartialSource,
    any_of,
    is_format_character,
    number_calls,
    replace_surrogates,
)
from toolwise.untrusted.bounds import MAX_CALLS

_MAX_REREADING = 4
_FREE_REREADING = 20_000
"""Characters that may be read again in any case: enough for every attempt at a short call."""
_NAME_CHARS = 600
"""How far into a block its name is looked for."""
_SPACE = re.compile(r"\s*")
_FLAGS = re.IGNORECASE | re.ASCII


@dataclass(frozen=True, slots=True)
class ContentPiece:
    """More of the reply's content. All pieces together are the content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """The call of this index has begun. If it turns out to be unreadable, the finished call has no name."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """More of a call's arguments as they are written, for formats in which they are JSON. All pieces together lack the
    closing brace: whether the call is readable is known only at its end."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallFinished:
    index: int
    call: ToolCall


StreamEvent = ContentPiece | CallStarted | ArgumentsPiece | CallFinished


class CallStream:
    """Feed it pieces of a reply, then `finish`; `reply` is then what `parse` gives for the whole text.

    `thought_open` says whether the prompt ends inside a thought (a template that writes `<think>` after the
    assistant's header). If it is not known (None), a later `</think>` can turn a call into part of a thought: calls are
    then reported only at the end. Without a `form`, nothing is certain before the end.
    """

    def __init__(
        self,
        parse: Callable[[str], ParsedReply],
        form: BlockFormat | None = None,
        thought_open: bool | None = None,
    ) -> None:
        self.reply: ParsedReply | None = None
        self._parse = parse
        self._form = form
        self._thought_open = thought_open if form is None or form.streams or thought_open else None
        self._text: list[str] = []
        self._pending: list[str] = []
        """Text that has not been used, in pieces: joined only where it is read."""
        self._pending_chars = self._arrived = self._reread = 0
        self._tail = ""
        self._content = _ContentFilter()
        self._fresh = True
        """Whether the reply, or its part after the leading thought, has not begun."""
        self._calls = 0
        self._announced = False
        self._arguments: tuple[ArgumentStream, int] | None = None
        """Those of the announced call, and where they begin in its block."""
        self._state = "held"
        """"undecided": a thought may come; "thought"; "after": another may; "body"; "block"; "held": until the end."""
        if form is not None:
            self._state = ("thought" if thought_open else "undecided") if form.thoughts else "body"
            self._marks = _marks_of(form)

    def feed(self, piece: str) -> list[StreamEvent]:
        """What the next piece makes certain."""
        piece = replace_surrogates(piece)
        self._text.append(piece)
        self._arrived += len(piece)
        if self._state == "held":
            return []
        self._pending.append(piece)
        self._pending_chars += len(piece)
        events: list[StreamEvent] = []
        if self._state != "block" or self._may_complete(piece):
            source, position = PartialSource("".join(self._pending)), 0
            while (after := self._advance(source, position, events)) is not None:
                position = after
            self._pending = [source[position:]] if self._state != "held" else []
            self._pending_chars = len(source) - position
            self._tail = source[-self._marks.longest :]
        if self._state == "block":
            self._announce(piece, events)
        return events

    def finish(self) -> list[StreamEvent]:
        """The end of the text: everything that has not been reported."""
        self.reply = self._parse_all("".join(self._text))
        content, calls = self.reply
        rest = content[self._content.shown :]
        events: list[StreamEvent] = [ContentPiece(rest)] if rest else []
        for call in calls[self._calls :]:
            self._report(call, events)
        return events

    def _parse_all(self, text: str) -> ParsedReply:
        if self._form is None or not self._form.thoughts:
            return self._parse(text)
        if self._form.streams:
            return self._form.parse(text, self._thought_open)
        closing = self._marks.closing.search(text) if self._thought_open else None
        if not self._thought_open:
            return self._parse(text)
        if closing is None:
            return replace_surrogates(text), []
        content, calls = self._parse(text[closing.end() :])
        return replace_surrogates(text[: closing.end()]) + content, calls

    def _advance(self, source: PartialSource, position: int, events: list[StreamEvent]) -> int | None:
        """Use some text from `position` and return where it ends; None if more is needed."""
        if position == len(source) or self._state == "held":
            return None
        step = {
            "undecided": self._undecided,
            "thought": self._thought,
            "after": self._after,
            "body": self._body,
            "block": self._block,
        }
        return step[self._state](source, position, events)

    def _undecided(self, source: PartialSource, position: int, events: list[StreamEvent]) -> int | None:
        """Before it is known whether the reply starts with a thought."""
        if self._fresh and (self._starts_call(source, position) or self._starts_unseen(source, position)):
            return self._hold()
        mark = self._marks.any.search(source, position)
        end = mark.start() if mark else self._marks.certain_end(source)
        if self._fresh and source[position:end].strip():
            if self._thought_open is None and (self._content.space or source[position].isspace()):
                return self._hold()  # white space before a thought is kept, and dropped before anything else
            self._fresh = False
        if mark is None:
            self._content.add(source[position:end], events)
            return None if end == position else end
        if self._marks.closing.fullmatch(mark[0]) and self._thought_open is None:
            self._content.add_all(source[position : mark.end()], events)
            return self._end_thought(mark.end())
        if self._marks.opening.fullmatch(mark[0]) and self._fresh:
            self._content.add_all(source[position : mark.end()], events)
            self._state = "thought"
            return mark.end()
        self._content.add(source[position:end], events)
        if self._thought_open is None:
            return self._hold()
        self._state = "body"
        return end

    def _thought(self, source: PartialSource, position: int, events: list[StreamEvent]) -> int | None:
        assert self._form is not None
        mark = self._marks.closing.search(source, position)
        end = mark.end() if mark else self._marks.certain_end(source)
        if not self._form.streams and self._marks.block.search(source, position, end):
            return self._hold()  # Llama's end of the turn is dropped even from a thought
        self._content.add_all(source[position:end], events)
        return self._end_thought(end) if mark else None if end == position else end

    def _end_thought(self, position: int) -> int:
        assert self._form is not None
        self._state = "after" if self._form.streams or not self._thought_open else "held"
        self._fresh, self._content.stripped = True, False
        return position

    def _after(self, source: PartialSource, position: int, events: list[StreamEvent]) -> int | None:
        """Before it is known whether another thought follows."""
        if self._starts_call(source, position) or self._starts_unseen(source, position):
            return self._hold()
        start = _space_end(source, position)
        if start > position:
            self._content.add(source[position:start], events)
            return start
        if opening := self._marks.opening.match(source, position):
            self._content.add_all(opening[0], events)
            self._state = "thought"
            return opening.end()
        rest = source[position : position + self._marks.longest].lower()
        if any(opening.lower().startswith(rest) for opening in THOUGHT_OPENINGS):
            return None
        self._state = "body"
        return position

    def _body(self, source: PartialSource, position: int, events: list[StreamEvent]) -> int | None:
        if self._fresh and self._starts_call(source, position):
            return self._hold()
        mark = self._marks.block.search(source, position)
        end = mark.start() if mark else self._marks.certain_end(source)
        if source[position:end].strip():
            self._fresh = False
        self._content.add(source[position:end], events)
        if mark is None:
            return None if end == position else end
        assert self._form is not None
        if not self._form.streams:
            return self._hold()
        self._state, self._fresh, self._announced = "block", False, False
        return end

    def _block(self, source: PartialSource, position: int, events: list[StreamEvent]) -> int | None:
        mark = self._marks.block.match(source, position)
        assert mark is not None
        assert self._form is not None
        try:
            block = self._form.read(source, mark)
        except NeedMoreTextError:
            self._reread += len(source) - position
            return None
        if self._calls + len(block.calls) > MAX_CALLS:
            return self._hold()
        if self._arguments is not None:
            arguments, start = self._arguments
            self._add_arguments(source[position + start + arguments.fed : block.end], events)
        for call in number_calls(block.calls, self._calls):
            self._report(call, events)
        self._state = "body"
        return block.end

    def _hold(self) -> int | None:
        """Nothing more is certain before the end."""
        self._state = "held"
        return None

    def _starts_call(self, source: PartialSource, position: int) -> bool:
        assert self._form is not None
        start = _space_end(source, position)
        return source[start : start + 1] in self._form.starts

    def _starts_unseen(self, source: PartialSource, position: int) -> bool:
        """Whether characters that cannot be seen come first: kept before a thought, as white space is."""
        start = _space_end(source, position)
        return is_format_character(source[start : start + 1])

    def _may_complete(self, piece: str) -> bool:
        """Whether the piece, with the text just before it, has a mark that may complete the block."""
        window = self._tail + piece
        self._tail = window[-self._marks.longest :]
        affordable = self._reread + self._pending_chars <= _MAX_REREADING * self._arrived + _FREE_REREADING
        return affordable and self._marks.trigger.search(window) is not None

    def _announce(self, piece: str, events: list[StreamEvent]) -> None:
        """Report the name of the block's first call as soon as it is known, then its arguments."""
        assert self._form is not None
        if self._arguments is not None:
            self._add_arguments(piece, events)
        if self._announced or self._form.name is None or len(self._pending[0]) > _NAME_CHARS:
            return
        text = "".join(self._pending) if self._pending_chars <= _NAME_CHARS else ""
        mark = self._marks.block.match(text)
        name = self._form.name.match(text, mark.end()) if mark else None
        if name and name.lastgroup:
            events.append(CallStarted(self._calls, name[name.lastgroup].strip()))
            self._announced = True
            self._arguments = ArgumentStream(), name.end()
            self._add_arguments(text[name.end() :], events)

    def _add_arguments(self, text: str, events: list[StreamEvent]) -> None:
        assert self._arguments is not None
        if more := self._arguments[0].feed(text):
            events.append(ArgumentsPiece(self._calls, more))

    def _report(self, call: ToolCall, events: list[StreamEvent]) -> None:
        if not self._announced:
            events.append(CallStarted(self._calls, call.name))
        events.append(CallFinished(self._calls, call))
        self._calls += 1
        self._announced, self._arguments = False, None


def _space_end(text: str, position: int) -> int:
    space = _SPACE.match(text, position)
    return space.end() if space else position


class _ContentFilter:
    """Content as it will be in the end: without white space at its start and end."""

    def __init__(self) -> None:
        self.shown = 0
        self.space: list[str] = []
        """White space that counts only if more follows."""
        self.stripped = False
        """Whether anything but white space came since the start or the leading thought."""

    def add(self, text: str, events: list[StreamEvent]) -> None:
        words = text.rstrip()
        if words:
            self._show("".join(self.space) + words if self.stripped else words.lstrip(), events)
            self.space, self.stripped = [], True
        if self.stripped or not words:
            self.space.append(text[len(words) :])

    def add_all(self, text: str, events: list[StreamEvent]) -> None:
        """Text of a thought, which is kept as it is."""
        self._show("".join(self.space) + text, events)
        self.space = []

    def _show(self, text: str, events: list[StreamEvent]) -> None:
        if text:
            self.shown += len(text)
            events.append(ContentPiece(text))


class _Marks:
    """The patterns that a stream looks for."""

    def __init__(self, form: BlockFormat) -> None:
        blocks, thoughts = [*form.readers, *form.dropped], [*THOUGHT_OPENINGS, *THOUGHT_CLOSINGS]
        self.block = re.compile(any_of(blocks), _FLAGS)
        self.opening, self.closing = OPENING, CLOSING
        self.any = re.compile(any_of([*blocks, *thoughts]), _FLAGS)
        self.trigger = re.compile(any_of(form.triggers), _FLAGS)
        self._beginnings = {mark[:n].lower() for mark in (*blocks, *thoughts) for n in range(1, len(mark))}
        self.longest = max(map(len, [*blocks, *thoughts, *form.triggers]))

    def certain_end(self, text: str) -> int:
        """Where the text ends without a part that may be the beginning of a mark."""
        tail = text[-self.longest :].lower()
        first = next((n for n in range(len(tail), 0, -1) if tail[-n:] in self._beginnings), 0)
        return len(text) - first


@lru_cache(maxsize=64)
def _marks_of(form: BlockFormat) -> _Marks:
    return _Marks(form)
