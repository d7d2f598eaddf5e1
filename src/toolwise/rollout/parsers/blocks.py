"""Formats whose calls stand in blocks that start with a mark: `BlockFormat` reads them, whole or (stream.py) in pieces.

A format is a table: its marks, and for each mark the reader of the block behind it. A reader gets the source and the
position after the mark. On a `PartialSource` it raises `NeedMoreTextError` if the end of the source decides the result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple, Protocol

from toolwise.messages import ToolCall
from toolwise.rollout.parsers.json_calls import (
    JsonSource,
    ParsedReply,
    RawCall,
    any_of,
    mark_pattern,
    need_more,
    number_calls,
    skip_values,
    split_reasoning,
)

_FLAGS = re.IGNORECASE | re.ASCII
_SPACE = re.compile(r"\s*")


class Block(NamedTuple):
    """What a reader found, and where the rest of the text starts."""

    calls: Sequence[RawCall]
    end: int
    reasoning: str = ""


Reader = Callable[[JsonSource, int], Block]


class ReasonedReply(tuple[str, list[ToolCall]]):
    """The content and the calls of a reply whose thoughts are separate from its content."""

    reasoning: str

    @classmethod
    def of(cls, content: str, calls: list[ToolCall], reasoning: str) -> ReasonedReply:
        reply = cls((content, calls))
        reply.reasoning = reasoning
        return reply


def reasoning_of(reply: ParsedReply) -> str:
    """Thoughts that are not in the reply's content; "" for most formats, which leave them there."""
    return reply.reasoning if isinstance(reply, ReasonedReply) else ""


def skip_json(source: JsonSource, mark: re.Match[str]) -> int:
    """End of the JSON values after a mark."""
    return skip_values(source, mark.end())


@dataclass(frozen=True, slots=True, eq=False)
class BlockFormat:
    readers: Mapping[str, Reader]
    """The marks that start a block (in any case of letters), with the reader of each."""
    triggers: tuple[str, ...]
    """Text that may complete a block."""
    dropped: tuple[str, ...] = ()
    """Marks that mean nothing by themselves, such as those around a list of blocks."""
    skip: Callable[[JsonSource, re.Match[str]], int] = skip_json
    """End of a complete block after its mark, else the mark's own end. Must fail fast: it is tried at every mark."""
    name: re.Pattern[str] | None = None
    """Matches the beginning of a block as soon as it tells the name of its (first) call."""
    thoughts: bool = True
    """Whether a reply may start with a thought in one of the usual pairs of tags."""
    starts: tuple[str, ...] = ()
    """A reply that starts with one of these may be a call without a mark."""
    streams: bool = True
    """Whether each block is read on its own; if not, nothing after the first mark is certain before the end."""
    marks: re.Pattern[str] = field(init=False)
    _blocks: re.Pattern[str] = field(init=False)
    _readers: dict[str, Reader] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "marks", mark_pattern(any_of(self.readers), any_of(self.dropped)))
        object.__setattr__(self, "_blocks", re.compile(any_of([*self.readers, *self.dropped]), _FLAGS))
        object.__setattr__(self, "_readers", {mark.lower(): reader for mark, reader in self.readers.items()})

    def parse(self, text: str, thought_open: bool | None = None) -> ParsedReply:
        """`thought_open`: whether the prompt ends inside a thought; None if that is not known."""
        if self.thoughts:
            head, body = split_reasoning(text, self.marks, self.skip, thought_open)
        else:
            head, body = split_reasoning(text, _NOTHING)
        return self.collect(head, body)

    def collect(self, head: str, body: JsonSource) -> ParsedReply:
        """Read the blocks of `body` as calls; the remaining text is appended to `head`."""
        outside: list[str] = []
        calls: list[RawCall] = []
        thoughts: list[str] = []
        position = 0
        while mark := self._blocks.search(body, position):
            outside.append(body[position : mark.start()])
            block = self.read(body, mark)
            position = block.end
            calls.extend(block.calls)
            if block.reasoning:
                thoughts.append(block.reasoning)
        outside.append(body[position:])
        content = head + "".join(outside).strip()
        numbered = number_calls(calls)
        return ReasonedReply.of(content, numbered, "\n".join(thoughts)) if thoughts else (content, numbered)

    def read(self, source: JsonSource, mark: re.Match[str]) -> Block:
        """The block behind a mark; nothing for a mark that is dropped."""
        reader = self._readers.get(mark[0].lower())
        return reader(source, mark.end()) if reader else Block((), mark.end())


_NOTHING = re.compile("(?!)")


class CallTable(Protocol):
    """A row of a table-driven module: what it says of a format is enough to read and to write it."""

    def block_format(self) -> BlockFormat: ...

    def render(self, content: str, calls: Sequence[ToolCall]) -> str: ...


@cache
def _closing_pattern(mark: str, others: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(any_of([mark, *others]), _FLAGS)


@dataclass(frozen=True, slots=True)
class Closing:
    """The mark that ends a block. `others` end a block whose own mark is missing, and stay in the text."""

    mark: str
    others: tuple[str, ...] = ()
    _any: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_any", _closing_pattern(self.mark, self.others))

    def match(self, source: JsonSource, position: int) -> int | None:
        """End of the block if nothing but its closing mark, or a part of it that was cut off, follows."""
        space = _SPACE.match(source, position)
        position = space.end() if space else position
        if mark := self._any.match(source, position):
            return mark.end() if mark[0].lower() == self.mark.lower() else position
        rest = source[position : position + len(self.mark)].rstrip().lower()
        tail = _SPACE.match(source, position + len(rest))
        if not self.mark.lower().startswith(rest) or (tail and tail.end() < len(source)):
            return None
        need_more(source)
        return len(source)

    def find(self, source: JsonSource, position: int) -> tuple[int, int]:
        """Where a block that cannot be read ends, and where the text after it starts."""
        mark = self._any.search(source, position)
        if mark is None:
            need_more(source)
            return len(source), len(source)
        return (mark.start(), mark.end() if mark[0].lower() == self.mark.lower() else mark.start())

    def bad(self, source: JsonSource, start: int, position: int, name: str = "") -> Block:
        """A call that cannot be read: its text from `start`, up to the first closing mark after `position`."""
        end, after = self.find(source, position)
        return Block([(name, source[start:end].strip())], after)


def skip_closed(opening: str, closing: str, marks: Sequence[str]) -> Callable[[JsonSource, re.Match[str]], int]:
    """`skip` for blocks that are not JSON: they start with the pattern `opening`, and `closing` comes before the next
    of `marks`. That the next mark is the limit keeps the search linear."""
    start, next_mark = re.compile(opening, _FLAGS), re.compile(any_of([closing, *marks]), _FLAGS)

    def skip(source: JsonSource, mark: re.Match[str]) -> int:
        if not start.match(source, mark.end()):
            return mark.end()
        after = next_mark.search(source, mark.end())
        return after.end() if after and after[0].lower() == closing.lower() else mark.end()

    return skip
