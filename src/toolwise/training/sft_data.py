"""The conversations of an SFT run: read from files or rows, held out for validation, and tokenised once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from toolwise.config.sft import SftConfig
from toolwise.data.files import read_rows, row_error
from toolwise.data.prompts import FieldError, read_message
from toolwise.errors import ConfigError, DataError, ModelError
from toolwise.messages import Message
from toolwise.serialization.json_text import json_line
from toolwise.untrusted.bounds import truncate_text

if TYPE_CHECKING:
    from toolwise.learner.conversations import Example
    from toolwise.rollout.chat_tokenizer import ChatTokenizer

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A row of the data."""

    path: Path
    number: int
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    context: int = 0
    """Number of leading messages that are the prompt: assistant messages among them are not trained on."""


@dataclass(frozen=True, slots=True)
class TokenizedSplit:
    """Training or held-out conversations as rows of tokens."""

    rows: list[Example]
    conversations: int
    truncated: int
    dropped: int
    """Too long, and dropped as a whole or left without a reply to train on."""
    reply_lengths: Sequence[int]
    """Tokens of each reply, as written: before conversations were truncated or dropped."""

    def reply_tokens(self) -> dict[str, int]:
        """What `rollout.max_new_tokens` must leave room for: half of the replies are longer than the median, one in
        twenty is longer than `p95`."""
        ordered = sorted(self.reply_lengths)
        return {"median": _quantile(ordered, 0.5), "p95": _quantile(ordered, 0.95), "max": ordered[-1]}

    def describe_long(self, limit: int) -> str | None:
        """What happened to conversations that were too long; None if there were none."""
        if not self.truncated + self.dropped:
            return None
        parts = [f"{self.truncated} truncated"] if self.truncated else []
        parts += [f"{self.dropped} dropped"] if self.dropped else []
        return (
            f"{self.truncated + self.dropped} of {self.conversations} conversations have more than row_tokens = "
            f"{limit} tokens: {', '.join(parts)}"
        )


def read_conversations(config: SftConfig, rows: Rows | None, val: Rows | None) -> tuple[list[Conversation], ...]:
    """Training and held-out conversations; `rows` and `val` replace the files that the configuration names."""
    if rows is None and config.data.train is None:
        raise ConfigError("there are no conversations: set data.train to a file, or give one")
    train = _read(config.data.train, rows, "data")
    held_out = [] if val is None and config.data.val is None else _read(config.data.val, val, "val")
    if config.data.val_fraction:
        chosen = set(held_out_rows(len(train), config.data.val_fraction, config.seed))
        held_out = [train[index] for index in sorted(chosen)]
        train = [conversation for index, conversation in enumerate(train) if index not in chosen]
    return train, held_out


def held_out_rows(count: int, fraction: float, seed: int) -> list[int]:
    """The indices of a random share of the rows: at least one, and never all of them."""
    if count < 2:
        raise ConfigError(f"data.val_fraction = {fraction:g} needs at least 2 conversations, there are {count}")
    return Random(f"{seed}/held out").sample(range(count), min(count - 1, max(1, round(count * fraction))))


def _read(file: Path | None, rows: Rows | None, name: str) -> list[Conversation]:
    path = Path(name) if rows is not None or file is None else file
    conversations = [
        read_conversation(path, number, row)
        for number, row in enumerate(read_rows(path) if rows is None else map(dict, rows))
    ]
    if not conversations:
        raise DataError(f"{path}: there are no conversations to train on")
    return conversations


def read_conversation(path: Path, number: int, row: Mapping[str, Any]) -> Conversation:
    """A row's messages (column `messages`, or `prompt` and `response`) and its tool schemas, if any."""
    error = partial(row_error, path, number)
    raw, context = row.get("messages"), 0
    reply = next((name for name in ("response", "completion") if name in row), None)
    if raw is None and "prompt" in row and reply is not None:
        prompt = _as_messages(error, row, "prompt", "user")
        raw, context = [*prompt, *_as_messages(error, row, reply, "assistant")], len(prompt)
    if not isinstance(raw, list) or not raw:
        columns = ", ".join(map(str, row)) or "none"
        raise error(
            "messages",
            "expected a list of {role, content}, one conversation per row, or the columns prompt and response; the "
            f"row's columns are {truncate_text(columns, 200)}",
        )
    messages = [read_message(error, message, f"messages[{index}]") for index, message in enumerate(raw)]
    _check_trained_calls(error, messages, context)
    tools = row.get("tools")
    if tools and (not isinstance(tools, list) or not all(isinstance(t, dict) and "function" in t for t in tools)):
        raise error("tools", "expected a list of tool schemas in OpenAI's format")
    return Conversation(path, number, messages, tools or None, context)


def _as_messages(error: FieldError, row: Mapping[str, Any], name: str, role: str) -> list[Any]:
    """A column that holds a text, or a list of messages."""
    value = row[name]
    if isinstance(value, list | tuple):
        return list(value)
    if value is not None and not isinstance(value, str):
        raise error(name, f"expected a text or a list of messages, got a {type(value).__name__}")
    return [{"role": role, "content": value}]


def _check_trained_calls(error: FieldError, messages: Sequence[Message], context: int) -> None:
    """Raise if a model would be taught to write a call that no tool can be called with."""
    for index, message in enumerate(messages):
        for place, call in enumerate((message.tool_calls or ()) if index >= context else ()):
            if isinstance(call.arguments, str):
                raise error(
                    f"messages[{index}].tool_calls[{place}].arguments",
                    f"not a JSON object: {truncate_text(repr(call.arguments), 80)}; correct it, or leave the row out",
                )


def fingerprint(*splits: Sequence[Conversation]) -> str:
    """A hash of the conversations in their order, and of which of them are held out; not of their files' names."""
    digest = sha256()
    for split in splits:
        digest.update(f"{len(split)} conversations\n".encode())
        for row in split:
            messages = [
                {name: value for name, value in message if value is not None}
                | {"tool_calls": [[call.id, call.name, call.arguments] for call in message.tool_calls or ()]}
                for message in row.messages
            ]
            digest.update(json_line([messages, row.tools, row.context]))
    return digest.hexdigest()


def tokenize(config: SftConfig, chat: ChatTokenizer, conversations: Sequence[Conversation]) -> TokenizedSplit:
    """Tokenise conversations as rollouts see them, and fit them into `row_tokens`."""
    from toolwise.learner.conversations import tokenize_conversation

    rows: list[Example] = []
    reply_lengths: list[int] = []
    truncated = dropped = 0
    call_format = chat.find_format(config.rollout.tool_parser)
    for conversation in conversations:
        try:
            examples = tokenize_conversation(
                chat,
                conversation.messages,
                conversation.tools,
                context=conversation.context,
                on_change=config.rollout.on_template_change,
                call_format=call_format,
            )
        except (DataError, ModelError) as fault:
            raise row_error(conversation.path, conversation.number, "messages", str(fault)) from fault
        reply_lengths += [length for example in examples for length in example.reply_lengths().tolist()]
        fitting = [_fit(config, example) for example in examples]
        kept = [example for example in fitting if example is not None and example.targets]
        dropped += len(kept) < len(examples)
        truncated += len(kept) == len(examples) and any(len(example) > config.row_tokens for example in examples)
        rows += kept
    if conversations and not rows:
        raise DataError(
            f"{conversations[0].path}: there is nothing to train on: no conversation "
            + (
                f"has a reply within row_tokens = {config.row_tokens}"
                if config.too_long == "truncate"
                else f"fits into row_tokens = {config.row_tokens}"
            )
            + "; raise it, or shorten the conversations"
        )
    return TokenizedSplit(rows, len(conversations), truncated, dropped, reply_lengths)


def _quantile(ordered: Sequence[int], share: float) -> int:
    """The smallest value that at least `share` of the values do not exceed."""
    return ordered[math.ceil(share * len(ordered)) - 1]


def _fit(config: SftConfig, example: Example) -> Example | None:
    if len(example) <= config.row_tokens:
        return example
    return example.truncated(config.row_tokens) if config.too_long == "truncate" else None
