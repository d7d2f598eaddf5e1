"""The tokens of one episode: a buffer that only ever grows, in which nothing sampled is tokenised again.

A policy asks for the `prompt` of its next turn, samples, and `add`s what it sampled. Each turn's prompt begins with all
that the turn before it saw and sampled, to the token, or it begins a new row. Which of the two it was is counted;
a turn is judged by what has changed since the turn before it:

- clean: the template, asked to write the whole conversation, writes just what the buffer holds, and goes on from there.
- realigned: it would write the last reply or earlier turns otherwise (other tokens for the same text, calls in another
  spelling, thoughts left out). The buffer keeps what was sampled, and gets what the template writes after the reply.
- forked: what stood before the reply is no longer so (other tools on offer, a history that somebody edited), which no
  appending can say. A new row begins with the whole conversation as the template writes it now.

`on_change="fork"` begins a new row also where the template itself would write other text for what has been said, as
Qwen3's does when it drops earlier thoughts: the model then always sees what a server would show it, and a rollout
becomes several rows. The default, "append", keeps one row a rollout: cheaper, and each token is learned from in the
context it was sampled in, either way.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from toolwise.errors import ModelError
from toolwise.messages import Message, Prefix
from toolwise.rollout.chat_tokenizer import ChatTokenizer, Tools
from toolwise.rollout.control_tokens import strip_guard_marks

Alignment = Literal["first", "clean", "realigned", "forked"]
OnChange = Literal["append", "fork"]


@dataclass(frozen=True, slots=True)
class _TurnPrompt:
    """A prompt that has been asked for, and what it rests on."""

    ids: array[int]
    text: str | None
    """The template's word on the conversation; None where it has none."""
    message_count: int
    """How many messages there were: the reply is the next."""
    tools: Tools
    alignment: Alignment


class TokenBuffer:
    """One episode's tokens. Until `add` is called, asking for a prompt again changes nothing and counts nothing."""

    def __init__(
        self, chat: ChatTokenizer, *, prompt_ids: Sequence[int] | None = None, on_change: OnChange = "append"
    ) -> None:
        self.chat = chat
        self.on_change = on_change
        self.counts: Counter[Alignment] = Counter()
        """How the turns of this episode stood."""
        self._prompt_ids = prompt_ids
        self._ids = array("i")
        self._committed_length = 0
        self._sampled: list[int] = []
        self._closed = True
        self._last_turn: _TurnPrompt | None = None
        self._pending_turn: _TurnPrompt | None = None

    def prompt(self, messages: Sequence[Message], tools: Tools = None) -> Prefix[int]:
        """All that the model is to see before its next reply. `messages` is the whole conversation so far."""
        self._pending_turn = (
            self._first(messages, tools) if self._last_turn is None else self._next(self._last_turn, messages, tools)
        )
        return Prefix(self._pending_turn.ids)

    def add(self, sampled: Sequence[int], *, closed: bool) -> Alignment:
        """Take in the reply to the last prompt; `closed`: its last token ended the turn. Says how the prompt stood."""
        if self._pending_turn is None:
            raise RuntimeError("add before prompt: there is nothing that this could be the reply to")
        self._last_turn, self._pending_turn = self._pending_turn, None
        self._ids = self._last_turn.ids
        self._ids.extend(sampled)
        self._committed_length = len(self._ids)
        self._sampled, self._closed = list(sampled), closed
        if self._last_turn.alignment == "forked":
            self._prompt_ids = None  # the row is the template's from here on
        self.counts[self._last_turn.alignment] += 1
        return self._last_turn.alignment

    def _first(self, messages: Sequence[Message], tools: Tools) -> _TurnPrompt:
        if self._prompt_ids is not None:
            return _TurnPrompt(array("i", self._prompt_ids), None, len(messages), tools, "first")
        return self._start_row(messages, tools, "first")

    def _start_row(self, messages: Sequence[Message], tools: Tools, alignment: Alignment) -> _TurnPrompt:
        text = self.chat.render(messages, tools)
        return _TurnPrompt(array("i", self.chat.encode(text)), text, len(messages), tools, alignment)

    def _next(self, last: _TurnPrompt, messages: Sequence[Message], tools: Tools) -> _TurnPrompt:
        if len(messages) <= last.message_count or messages[last.message_count].role != "assistant":
            return self._start_row(messages, tools, "forked")  # the conversation no longer has the reply
        try:
            text: str | None = self.chat.render(messages, tools)
        except ModelError:
            text = None  # a template may refuse a reply that the model did give; what follows it can still be said
        news = self._continuation(last, text)
        if news is not None:
            return _TurnPrompt(self._extend_ids(news), text, len(messages), tools, "clean")
        if self._history_changed(last, text, messages, tools):
            return self._start_row(messages, tools, "forked")
        after = self.chat.encode_continuation(
            messages[last.message_count + 1 :], tools, after=messages[: last.message_count + 1]
        )
        news = after if self._closed else [self.chat.end_id, *after]
        return _TurnPrompt(self._extend_ids(news), text, len(messages), tools, "realigned")

    def _continuation(self, last: _TurnPrompt, text: str | None) -> list[int] | None:
        """What the template writes after the buffer, where it writes the buffer's own tokens first."""
        if last.text is None or text is None or not text.startswith(last.text):
            return None
        tail = self.chat.tail(last.text)
        length = len(self.chat.encode(tail)) + len(self._sampled)
        ids = self.chat.encode(tail + text[len(last.text) :])
        return (
            ids[length:]
            if ids[:length] == self._ids[self._committed_length - length : self._committed_length].tolist()
            else None
        )

    def _history_changed(self, last: _TurnPrompt, text: str | None, messages: Sequence[Message], tools: Tools) -> bool:
        """Whether what the model saw before its last reply is no longer what it is to see."""
        if self._prompt_ids is not None:
            return False  # ids that came with a task are nobody's rendering: there is nothing to compare with
        if last.text is None:
            return tools != last.tools
        if self.chat.render(messages[: last.message_count], tools) != last.text:
            return True
        return self.on_change == "fork" and text is not None and not self._same_text(last.text, text)

    def _same_text(self, last: str, text: str) -> bool:
        """Whether the template still writes what was said, if perhaps with other tokens."""
        reply = self.chat.decode(self._sampled[:-1] if self._closed else self._sampled)
        return strip_guard_marks(text).startswith(strip_guard_marks(last + reply))

    def _extend_ids(self, news: Sequence[int]) -> array[int]:
        """The buffer with `news` after it. What an attempt before this one left there is used again, or left behind
        in a buffer of its own: somebody may still be reading it."""
        waiting = self._ids[self._committed_length :]
        if waiting and waiting.tolist() != list(news):
            self._ids = self._ids[: self._committed_length]
            waiting = array("i")
        if not waiting:
            self._ids.extend(news)
        return self._ids
