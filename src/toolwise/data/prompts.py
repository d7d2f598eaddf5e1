"""Reads the prompt of a row: its messages, or its token ids.

Left padding is removed by the attention mask, never by the pad id.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from toolwise.errors import DataError
from toolwise.messages import Message, ToolCall

FieldError = Callable[[str, str], DataError]
"""Builds an error from (field, problem) that also names the row."""


def read_message(error: FieldError, value: Any, field: str) -> Message:
    """A message of a row; `error` builds the error for a bad one."""
    if not isinstance(value, dict | Message):
        raise error(field, f"a {type(value).__name__}, not a message; write {{role, content}}")
    try:
        message = Message.model_validate(value)
        (message.content or "").encode()
    except ValidationError as fault:
        inner, problem = first_error(fault)
        raise error(f"{field}.{inner}".rstrip("."), problem) from fault
    except UnicodeEncodeError as fault:
        raise error(f"{field}.content", f"not valid Unicode ({fault.reason}); correct the text") from fault
    if message.content is None and not message.tool_calls:
        raise error(f"{field}.content", "missing; only an assistant message with tool_calls may leave it out")
    for index, call in enumerate(message.tool_calls or ()):
        _check_call(error, call, f"{field}.tool_calls[{index}]")
    return message


def _check_call(error: FieldError, call: ToolCall, field: str) -> None:
    """Raise unless name, id and arguments can be written as JSON in UTF-8."""
    for name, text in (("name", call.name), ("id", call.id)):
        if not is_unicode(text):
            raise error(f"{field}.{name}", "not valid Unicode (lone surrogate); correct the text")
    values: list[Any] = [call.arguments]
    while values:  # without recursion: arguments may be nested deeply
        value = values.pop()
        if isinstance(value, dict):
            values += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            values += value
        elif isinstance(value, float) and not math.isfinite(value):
            raise error(f"{field}.arguments", f"{value} is not a JSON number; give a finite one, or null")
        elif isinstance(value, str) and not is_unicode(value):
            raise error(f"{field}.arguments", "not valid Unicode (lone surrogate); correct the text")


def as_unicode(text: str) -> str:
    """With "?" for what is not Unicode: a file's name may be any bytes."""
    return text.encode("utf-8", "replace").decode()


def is_unicode(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def read_prompt_ids(row: Mapping[str, Any], error: FieldError) -> list[int] | None:
    """The token ids of the row's prompt, from `prompt_ids` or `input_ids`; None if it has neither."""
    present = [name for name in ("prompt_ids", "input_ids") if row.get(name) is not None]
    if not present:
        return None
    if len(present) == 2:
        raise error("prompt_ids", "the row also has input_ids; keep one of the two")
    ids = row[name := present[0]]
    if not isinstance(ids, list) or not ids or not all(type(item) is int and item >= 0 for item in ids):
        raise error(name, "not a list of token ids; give at least one, all integers from 0 up")
    mask = row.get("attention_mask")
    return list(ids) if mask is None else _strip_left_padding(ids, mask, error)


def _strip_left_padding(ids: list[int], mask: Any, error: FieldError) -> list[int]:
    if not isinstance(mask, list) or not all(isinstance(item, int) and item in (0, 1) for item in mask):
        raise error("attention_mask", "not a list of zeros and ones; give one for each token id")
    if len(mask) != len(ids):
        raise error("attention_mask", f"has {len(mask)} items for {len(ids)} token ids; give one for each")
    padding = len(mask) - sum(mask)
    if padding == len(mask):
        raise error("attention_mask", "masks every token; a prompt needs at least one")
    # The pad id may equal the end-of-text id, which can be a real token in a prompt: only the mask can tell.
    if any(mask[:padding]):
        raise error("attention_mask", "is not zeros followed by ones; pad prompts on the left only")
    return ids[padding:]


def first_error(error: ValidationError) -> tuple[str, str]:
    """The location and one-line message of the first validation error."""
    fault = error.errors()[0]
    got = f", got {fault['input']!r:.60}" if fault["type"] != "missing" else ""
    return ".".join(str(part) for part in fault["loc"]), f"{fault['msg']}{got}; correct it"
