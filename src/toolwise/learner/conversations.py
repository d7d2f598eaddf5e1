"""Conversations as rows of tokens for SFT: the same tokens that a rollout with these messages would have had.

The tokens come from the rollouts' own `TokenBuffer`: prompt, reply, continuation, reply, … Only replies are trained on,
each with its end-of-turn token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolwise.errors import DataError
from toolwise.messages import Message
from toolwise.rollout.call_format import CallFormat
from toolwise.rollout.chat_tokenizer import ChatTokenizer
from toolwise.rollout.control_tokens import strip_guard_marks
from toolwise.rollout.parsers.json_calls import THOUGHT_CLOSINGS
from toolwise.rollout.tokens import OnChange, TokenBuffer


@dataclass(frozen=True, slots=True)
class Example:
    """One row of tokens; `loss_mask` is True where the assistant wrote the token."""

    ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]

    @classmethod
    def of(cls, ids: Sequence[int], loss_mask: Sequence[bool]) -> Example:
        return cls(np.array(ids, np.int32), np.array(loss_mask, bool))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def sampled(self) -> NDArray[np.bool_]:
        """The loss mask under the name that packing expects."""
        return self.loss_mask

    @property
    def targets(self) -> int:
        """Number of tokens to train on; the first token of a row has no context and never counts."""
        return int(self.loss_mask[1:].sum())

    def reply_lengths(self) -> NDArray[np.intp]:
        """Tokens of each reply, its end-of-turn token included."""
        edges = np.flatnonzero(np.diff(np.concatenate([[False], self.loss_mask, [False]]).astype(np.int8)))
        return edges[1::2] - edges[::2]

    def truncated(self, length: int) -> Example:
        return Example(self.ids[:length].copy(), self.loss_mask[:length].copy())


def tokenize_conversation(
    chat: ChatTokenizer,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] | None = None,
    *,
    context: int = 0,
    on_change: OnChange = "append",
    call_format: CallFormat | None = None,
) -> list[Example]:
    """The rows of a conversation: one, or several if the template rewrites earlier turns and `on_change` is "fork".

    Assistant messages among the first `context` messages are part of the prompt and not trained on. What follows the
    last reply is left out. `call_format`: how rollouts read calls, by default as the template suggests.
    """
    call_format = call_format or chat.find_format("auto")
    buffer = TokenBuffer(chat, on_change=on_change)
    rows: list[tuple[list[int], list[bool]]] = []
    for index, message in enumerate(messages):
        if message.role != "assistant" or index < context:
            continue
        prompt = list(buffer.prompt(messages[:index], tools))
        reply = reply_tokens(chat, message, tools, call_format)
        buffer.add(reply, closed=True)
        if not rows or prompt[: len(rows[-1][0])] != rows[-1][0]:
            rows.append(([], []))
        ids, loss_mask = rows[-1]
        loss_mask += [False] * (len(prompt) - len(ids)) + [True] * len(reply)
        ids += [*prompt[len(ids) :], *reply]
    if not rows:
        raise DataError("the conversation has no assistant message to train on: add one or leave the conversation out")
    return [Example.of(*row) for row in rows]


def reply_tokens(
    chat: ChatTokenizer,
    message: Message,
    tools: Sequence[dict[str, Any]] | None = None,
    call_format: CallFormat | None = None,
) -> list[int]:
    """A reply as the template writes it, preceded by what it leaves out of the message: some templates drop thoughts,
    or the text beside calls, which a model writes all the same. Text after which rollouts would not read the calls is
    left out: those of Llama 3 begin a reply."""
    rendered, content = chat.render_reply(message, tools), message.content or ""
    reply = chat.encode(rendered)
    # Both as text, before the tokenizer, which may change letters. `guard` keeps the length, but for its marks.
    written, text = strip_guard_marks(rendered), strip_guard_marks(chat.controls.guard(content))
    if text.strip() in written:
        return reply
    bare = strip_guard_marks(chat.render_reply(message.model_copy(update={"content": ""}), tools))
    kept = len(content)
    if written.split() != bare.split():
        overlap = _overlap(text.rstrip(), written.lstrip())
        if written.lstrip()[overlap:].split() != bare.split():
            raise DataError("the chat template changes the text of an assistant message: SFT needs it as it is")
        kept = len(text.rstrip()) - overlap
    left_out = content[:kept]
    if message.tool_calls and call_format is not None:
        left_out = _readable_start(chat, left_out, reply, call_format, tools)
    return _after(chat, left_out, reply)


def _readable_start(
    chat: ChatTokenizer,
    text: str,
    reply: list[int],
    call_format: CallFormat,
    tools: Sequence[dict[str, Any]] | None,
) -> str:
    """As much of `text` as leaves the calls of the reply after it readable: all of it, its thought, or nothing."""

    def calls_after(start: str) -> list[tuple[str, Any]]:
        _, calls = call_format.parse_for(chat.decode(_after(chat, start, reply)), tools)
        return [(call.name, call.arguments) for call in calls]

    thoughts = [text[: text.index(end) + len(end)] for end in THOUGHT_CLOSINGS if end in text]
    return next(start for start in (text, *thoughts, "") if calls_after(start) == calls_after(""))


def _after(chat: ChatTokenizer, text: str, reply: list[int]) -> list[int]:
    return [*chat.encode(chat.end_text + chat.controls.guard(text))[1:], *reply]


def _overlap(text: str, other: str) -> int:
    """The length of the longest end of `text` that `other` starts with, in linear time (Knuth, Morris, Pratt)."""
    pattern = other[: len(text)]
    borders = [0] * len(pattern)  # of each start of the pattern: its longest proper start that is also its end
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = borders[length - 1]
        length += pattern[i] == pattern[length]
        borders[i] = length
    length = 0
    for letter in text:
        while length and (length == len(pattern) or letter != pattern[length]):
            length = borders[length - 1]
        length += bool(pattern) and letter == pattern[length]
    return length
