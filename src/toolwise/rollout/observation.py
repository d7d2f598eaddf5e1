"""Observations as messages, truncated to `MAX_OBSERVATION_CHARS` and free of lone surrogates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from toolwise.messages import Message, as_messages
from toolwise.untrusted.bounds import MAX_OBSERVATION_CHARS, truncate_text


def observation_messages(observation: str | Sequence[Message]) -> Iterable[Message]:
    """A string becomes a user message; an empty one gives no message."""
    if isinstance(observation, str):
        return [Message(role="user", content=truncate_text(observation, MAX_OBSERVATION_CHARS))] if observation else []
    return map(_truncate, as_messages(observation))


def _truncate(message: Message) -> Message:
    content = message.content
    if content is None or (len(content) <= MAX_OBSERVATION_CHARS and content.isascii()):
        return message
    return message.model_copy(update={"content": truncate_text(content, MAX_OBSERVATION_CHARS)})
