"""One choice of a completion while it is sampled: tokens become pieces of text and of tool calls.

Joined, the pieces are the message of the completion that is not streamed, with two exceptions. Arguments are spelt as
the model writes them. And calls that were begun in a reply that is cut off, which are text in the other, stay calls:
they end with the finish reason "length".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolwise.messages import ToolCall, parse_arguments
from toolwise.rollout.parsers import reasoning_of
from toolwise.rollout.parsers.json_calls import ParsedReply
from toolwise.rollout.parsers.stream import (
    ArgumentsPiece,
    CallFinished,
    CallStarted,
    CallStream,
    ContentPiece,
    StreamEvent,
)
from toolwise.rollout.text_stream import TextStream


class StopFilter:
    """Passes text on up to the first stop string. Holds back what may be the start of one. `dropped` comes before the
    text, as far as stop strings are concerned."""

    def __init__(self, stops: Sequence[str], dropped: str = "") -> None:
        self.stops = tuple(stops)
        self.stopped = False
        self._held = dropped
        self._unshown = len(dropped)

    def feed(self, piece: str) -> str:
        if self.stopped:
            return ""
        text = self._held + piece
        cut = cut_at_stop(text, self.stops)
        if cut is not None:
            self.stopped, self._held = True, ""
            return self._shown(cut)
        held = max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - held :]
        return self._shown(text[: len(text) - held])

    def finish(self) -> str:
        held, self._held = self._held, ""
        return self._shown(held)

    def _shown(self, text: str) -> str:
        unshown, self._unshown = self._unshown, max(0, self._unshown - len(text))
        return text[unshown:]


def cut_at_stop(text: str, stops: Sequence[str], dropped: str = "") -> str | None:
    """The text before the first stop string; None if it has none. `dropped` comes before the text."""
    whole = dropped + text
    found = [position for stop in stops if (position := whole.find(stop)) >= 0]
    return whole[len(dropped) : min(found)] if found else None


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is the start of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


@dataclass(slots=True)
class _StreamedCall:
    """A call of which a part was sent."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class ChoiceStream:
    """Turns the tokens of a choice into deltas: fields of an OpenAI message, of which each says more."""

    decode: Callable[[Sequence[int]], str]
    stops: Sequence[str] = ()
    call_stream: CallStream | None = None
    """Reads calls; None: the reply is text."""
    keep_calls: int | None = None
    """How many calls to keep; None: all."""
    call_id: Callable[[int], str] = "call_{}".format
    """The id of the call with an index."""
    dropped_space: Callable[[Sequence[int]], str] = lambda ids: ""
    """The space that the text of these first tokens leaves out."""
    sent: str = ""
    _filter: StopFilter = field(init=False)
    _text: TextStream = field(init=False)
    _pieces: list[str] = field(init=False, default_factory=list)
    _calls: dict[int, _StreamedCall] = field(init=False, default_factory=dict)
    _dropped: str | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._filter = StopFilter(self.stops)
        self._text = TextStream(self.decode, self._pieces.append)

    @property
    def called(self) -> bool:
        """Whether a call was sent."""
        return bool(self._calls)

    def feed(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """What new tokens make certain."""
        if self._dropped is None and self.stops:
            self._dropped = self.dropped_space(token_ids)
            self._filter = StopFilter(self.stops, self._dropped)
        self._text.add(token_ids)
        return self._delta(self._new_text())

    def finish(self, text: str, finish_reason: str) -> dict[str, Any]:
        """What is left of the message: content, reasoning and calls. `text` is the whole reply."""
        self._text.finish(text)
        delta = self._delta(self._new_text() + ("" if self._filter.stopped else self._filter.finish()))
        if self.call_stream is None:
            return delta
        if finish_reason == "length":  # calls in a reply that was cut off were not made: they are text
            reply = text.lstrip() if text.lstrip().startswith(self.sent) else self.sent
            rest = "" if self.called else reply[len(self.sent) :]
            return _joined(delta, self._content(rest))
        last = self.call_stream.finish()
        assert self.call_stream.reply is not None
        if self._filter.stopped and not self.called and not all(call.name for call in self.call_stream.reply[1]):
            # A stop string ended a call that was not sent yet: it is text.
            cut = cut_at_stop(text, self.stops, self._dropped or "") or ""
            return _joined(delta, self._content(cut.lstrip()[len(self.sent) :]))
        delta = _joined(delta, self._read(last))
        reasoning = reasoning_of(self.call_stream.reply)
        return delta | ({"reasoning_content": reasoning} if reasoning else {})

    def _new_text(self) -> str:
        text = "".join(map(self._filter.feed, self._pieces))
        self._pieces.clear()
        return text

    def _delta(self, text: str) -> dict[str, Any]:
        return self._content(text) if self.call_stream is None else self._read(self.call_stream.feed(text))

    def _content(self, text: str) -> dict[str, Any]:
        self.sent += text
        return {"content": text} if text else {}

    def _read(self, events: Sequence[StreamEvent]) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        for event in events:
            if isinstance(event, ContentPiece):
                delta = _joined(delta, self._content(event.text))
            elif self.keep_calls is None or event.index < self.keep_calls:
                delta = _joined(delta, self._call_delta(event))
        return delta

    def _call_delta(self, event: CallStarted | ArgumentsPiece | CallFinished) -> dict[str, Any]:
        if isinstance(event, CallStarted):
            self._calls[event.index] = _StreamedCall(event.name)
            head = {"id": self.call_id(event.index), "type": "function"}
            function = {"name": event.name, "arguments": ""}
            return {"tool_calls": [{"index": event.index, **head, "function": function}]}
        call = self._calls[event.index]
        more = event.text if isinstance(event, ArgumentsPiece) else _rest_of_arguments(call, event.call)
        call.arguments += more
        return {"tool_calls": [{"index": event.index, "function": {"arguments": more}}]} if more else {}


def _rest_of_arguments(sent: _StreamedCall, call: ToolCall) -> str:
    """What is left to send of a complete call. Nothing, and so no JSON, if it is not what it seemed to be."""
    if not sent.arguments:
        return str(call.to_openai()["function"]["arguments"])
    readable = call.name == sent.name and parse_arguments(sent.arguments + "}") == call.arguments
    return "}" if readable else ""


def _joined(delta: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Two deltas as one. The parts of a call follow each other, so only the last can go on."""
    joined = delta | more
    if "content" in delta and "content" in more:
        joined["content"] = delta["content"] + more["content"]
    if "tool_calls" in delta and "tool_calls" in more:
        joined["tool_calls"] = list(delta["tool_calls"])
        for part in more["tool_calls"]:
            last = joined["tool_calls"][-1]
            if last["index"] == part["index"]:
                arguments = last["function"]["arguments"] + part["function"]["arguments"]
                joined["tool_calls"][-1] = last | {"function": last["function"] | {"arguments": arguments}}
            else:
                joined["tool_calls"].append(part)
    return joined


def reply_fields(reply: ParsedReply, keep_calls: int | None = None) -> dict[str, Any]:
    """Reasoning and calls of a reply, as fields of an OpenAI message."""
    _, calls = reply
    reasoning = reasoning_of(reply)
    fields: dict[str, Any] = {"reasoning_content": reasoning} if reasoning else {}
    return fields | ({"tool_calls": [call.to_openai() for call in calls[:keep_calls]]} if calls else {})
