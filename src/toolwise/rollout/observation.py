"""What a world says, as messages: no longer than any model could read, and without halves of characters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from toolwise.bounds import LONGEST_OBSERVATION, cut
from toolwise.messages import Message, as_messages


def observed(observation: str | Sequence[Message]) -> Iterable[Message]:
    """A text is the user's word; nothing said is no message."""
    if isinstance(observation, str):
        return [Message(role="user", content=cut(observation, LONGEST_OBSERVATION))] if observation else []
    return map(_bounded, as_messages(observation))


def _bounded(message: Message) -> Message:
    content = message.content
    if content is None or (len(content) <= LONGEST_OBSERVATION and content.isascii()):
        return message
    return message.model_copy(update={"content": cut(content, LONGEST_OBSERVATION)})
