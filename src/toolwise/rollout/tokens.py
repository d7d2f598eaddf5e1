"""The tokens of one episode: an append-only buffer in which sampled tokens are never tokenised again.

A policy asks for the `prompt` of its next turn, samples, and `add`s the sampled tokens. Each turn's prompt either
starts with exactly the tokens that the previous turn saw and sampled, or starts a new row. Each turn has an
alignment, by what changed since the previous one:

- clean: rendering the whole conversation gives exactly the buffer's tokens, followed by new ones.
- realigned: the template would write the last reply or earlier turns differently (other tokens for the same text, other
  spelling of calls, thoughts left out). The buffer keeps the sampled tokens and appends what the template writes after
  the reply.
- forked: the part before the reply has changed (other tools, an edited history), so appending is not enough. A new row
  starts with the whole conversation as the template writes it now.

`on_change="fork"` also starts a new row when the template itself would write different text for earlier turns, as
Qwen3's does when it drops earlier thoughts: the model then always sees what a server would show it, and a rollout
becomes several rows. The default, "append", keeps one row per rollout, which is cheaper. Either way each token is
trained on in the context it was sampled in.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from toolwise.errors import ModelError
from toolwise.messages import Message, Prefix
from toolwise.rollout.chat_tokenizer import ChatTokenizer, Tools
from toolwise.rollout.control_tokens import strip_guard_marks
from toolwise.types.tokens import Alignment

OnChange = Literal["append", "fork"]


@dataclass(frozen=True, slots=True)
class _TurnPrompt:
    """The prompt of one turn and what it was built from."""

    ids: array[int]
    text: str | None
    """The rendered conversation; None if the template refuses it."""
    message_count: int
    """Number of messages in the prompt: the reply is the next one."""
    tools: Tools
    alignment: Alignment


class TokenBuffer:
    """One episode's tokens. Until `add` is called, asking for a prompt again changes nothing."""

    def __init__(
        self, chat: ChatTokenizer, *, prompt_ids: Sequence[int] | None = None, on_change: OnChange = "append"
    ) -> None:
        self.chat = chat
        self.on_change = on_change
        self._prompt_ids = prompt_ids
        self._ids = array("i")
        self._committed_length = 0
        self._sampled: list[int] = []
        self._closed = True
        self._last_turn: _TurnPrompt | None = None
        self._pending_turn: _TurnPrompt | None = None

    def prompt(self, messages: Sequence[Message], tools: Tools = None) -> Prefix[int]:
        """Tokens of the next turn's prompt. `messages` is the whole conversation so far."""
        self._pending_turn = (
            self._first(messages, tools) if self._last_turn is None else self._next(self._last_turn, messages, tools)
        )
        return Prefix(self._pending_turn.ids)

    def add(self, sampled: Sequence[int], *, closed: bool) -> Alignment:
        """Append the reply to the last prompt and return its alignment. `closed`: the last token ended the turn."""
        if self._pending_turn is None:
            raise RuntimeError("add() called before prompt(): there is no prompt to reply to")
        self._last_turn, self._pending_turn = self._pending_turn, None
        self._ids = self._last_turn.ids
        self._ids.extend(sampled)
        self._committed_length = len(self._ids)
        self._sampled, self._closed = list(sampled), closed
        if self._last_turn.alignment == "forked":
            self._prompt_ids = None  # from here on the row starts with rendered text
        return self._last_turn.alignment

    def fork(self, *, share: bool) -> TokenBuffer:
        """Another buffer that continues after the last reply. `share`: in the same memory, which one fork may do."""
        other = TokenBuffer(self.chat, prompt_ids=self._prompt_ids, on_change=self.on_change)
        other._ids = self._ids if share else self._ids[: self._committed_length]
        other._committed_length = self._committed_length
        other._sampled, other._closed, other._last_turn = self._sampled, self._closed, self._last_turn
        return other

    def _first(self, messages: Sequence[Message], tools: Tools) -> _TurnPrompt:
        if self._prompt_ids is not None:
            return _TurnPrompt(array("i", self._prompt_ids), None, len(messages), tools, "first")
        return self._start_row(messages, tools, "first")

    def _start_row(self, messages: Sequence[Message], tools: Tools, alignment: Alignment) -> _TurnPrompt:
        text = self.chat.render(messages, tools)
        return _TurnPrompt(array("i", self.chat.encode(text)), text, len(messages), tools, alignment)

    def _next(self, last: _TurnPrompt, messages: Sequence[Message], tools: Tools) -> _TurnPrompt:
        if len(messages) <= last.message_count or messages[last.message_count].role != "assistant":
            return self._start_row(messages, tools, "forked")  # the reply is no longer in the conversation
        try:
            text: str | None = self.chat.render(messages, tools)
        except ModelError:
            text = None  # a template may refuse a reply that the model did give; what follows it can still be rendered
        new_ids = self._continuation(last, text)
        if new_ids is not None:
            return _TurnPrompt(self._extend_ids(new_ids), text, len(messages), tools, "clean")
        if self._history_changed(last, text, messages, tools):
            return self._start_row(messages, tools, "forked")
        new_ids = self.chat.encode_continuation(
            messages[last.message_count + 1 :],
            tools,
            after=messages[: last.message_count + 1],
            closed=self._closed,
            stop_id=self._sampled[-1] if self._closed else None,
        )
        return _TurnPrompt(self._extend_ids(new_ids), text, len(messages), tools, "realigned")

    def _continuation(self, last: _TurnPrompt, text: str | None) -> list[int] | None:
        """Tokens the template adds after the buffer, if it reproduces the buffer exactly; otherwise None."""
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
        """Whether the part before the last reply would be rendered differently now."""
        if self._prompt_ids is not None:
            return False  # prompt_ids given with a task were not rendered here: there is nothing to compare with
        if last.text is None:
            return tools != last.tools
        if self.chat.render(messages[: last.message_count], tools) != last.text:
            return True
        return self.on_change == "fork" and text is not None and not self._same_text(last.text, text)

    def _same_text(self, last: str, text: str) -> bool:
        """Whether the template still writes the same text for prompt and reply, even if tokenised differently."""
        reply = self.chat.decode(self._sampled[:-1] if self._closed else self._sampled)
        return strip_guard_marks(text).startswith(strip_guard_marks(last + reply))

    def _extend_ids(self, new_ids: Sequence[int]) -> array[int]:
        """The buffer followed by `new_ids`. Tokens left by an earlier attempt are reused if equal; otherwise the buffer
        is copied first, because a `Prefix` handed out earlier may still be read."""
        pending = self._ids[self._committed_length :]
        if pending and pending.tolist() != list(new_ids):
            self._ids = self._ids[: self._committed_length]
            pending = array("i")
        if not pending:
            self._ids.extend(new_ids)
        return self._ids
