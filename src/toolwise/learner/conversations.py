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
from toolwise.rollout.chat_tokenizer import ChatTokenizer
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

    def truncated(self, length: int) -> Example:
        return Example(self.ids[:length].copy(), self.loss_mask[:length].copy())


def tokenize_conversation(
    chat: ChatTokenizer,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] | None = None,
    *,
    context: int = 0,
    on_change: OnChange = "append",
) -> list[Example]:
    """The rows of a conversation: one, or several if the template rewrites earlier turns and `on_change` is "fork".

    Assistant messages among the first `context` messages are part of the prompt and not trained on. What follows the
    last reply is left out.
    """
    buffer = TokenBuffer(chat, on_change=on_change)
    rows: list[tuple[list[int], list[bool]]] = []
    for index, message in enumerate(messages):
        if message.role != "assistant" or index < context:
            continue
        prompt = list(buffer.prompt(messages[:index], tools))
        reply = reply_tokens(chat, message, tools)
        buffer.add(reply, closed=True)
        if not rows or prompt[: len(rows[-1][0])] != rows[-1][0]:
            rows.append(([], []))
        ids, loss_mask = rows[-1]
        loss_mask += [False] * (len(prompt) - len(ids)) + [True] * len(reply)
        ids += [*prompt[len(ids) :], *reply]
    if not rows:
        raise DataError("the conversation has no assistant message to train on: add one or leave the conversation out")
    return [Example.of(*row) for row in rows]


def reply_tokens(chat: ChatTokenizer, message: Message, tools: Sequence[dict[str, Any]] | None = None) -> list[int]:
    """A reply as the template writes it, preceded by what it leaves out of the message: some templates drop thoughts,
    or the text beside calls, which a model writes all the same."""
    reply, content = chat.reply(message, tools), message.content or ""
    written = chat.decode(reply)
    if content.strip() in written:
        return reply
    kept = next(start for start in range(len(content) + 1) if written.lstrip().startswith(content[start:].rstrip()))
    return [*chat.encode(chat.end_text + chat.controls.guard(content[:kept]))[1:], *reply]
