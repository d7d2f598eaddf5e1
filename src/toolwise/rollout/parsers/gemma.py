"""Gemma's own notation: `call:NAME{key:value,…}`, in which only strings have quotes, and those are tokens.

gemma4 (Gemma 4):
    `<|tool_call>call:f{city:<|"|>Oslo<|"|>,days:3}<tool_call|>`
functiongemma (FunctionGemma):
    `<start_function_call>call:f{city:<escape>Oslo<escape>}<end_function_call>`

Objects are in {} and lists in []. A word without quotes is a JSON value if it is one, else a string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toolwise.messages import ToolCall
from toolwise.rollout.parsers.blocks import Block, BlockFormat, Closing
from toolwise.rollout.parsers.json_calls import MAX_DEPTH, JsonSource, decode, is_storable, join, need_more

_HEADER = re.compile(r"\s*call:(?P<name>[^\s{}<>:]{1,200})\s*\{")
_SPACE = re.compile(r"\s*")
_SEPARATOR = re.compile(r"\s*,?\s*")
_WORD = re.compile(r"[^,{}\[\]<]*")
_KEY = re.compile(r"[^:{}\[\],<]*(?=:)")


class _UnreadableError(Exception):
    """Carries the position at which the notation breaks."""

    def __init__(self, position: int) -> None:
        super().__init__()
        self.position = position


@dataclass(frozen=True, slots=True)
class GemmaCalls:
    opening: str
    closing: str
    quote: str
    response: str
    """Ends the model's turn after its calls, and starts the result."""

    def read(self, source: JsonSource, start: int) -> Block:
        header = _HEADER.match(source, start)
        if header is None:
            return Closing(self.closing).bad(source, start, start)
        try:
            return self._read_call(source, header)
        except _UnreadableError as fault:
            return Closing(self.closing).bad(source, header.end() - 1, fault.position, header["name"])

    def _read_call(self, source: JsonSource, header: re.Match[str]) -> Block:
        arguments, position = self._object(source, header.end(), 0)
        end = Closing(self.closing, (self.opening,)).match(source, position)
        if end is None or not is_storable(arguments):
            raise _UnreadableError(position)
        return Block([(header["name"], arguments)], end)

    def _skip(self, source: JsonSource, mark: re.Match[str]) -> int:
        """Linear, as for JSON: outside of a string nothing is read past the next mark."""
        header = _HEADER.match(source, mark.end())
        try:
            return self._read_call(source, header).end if header else mark.end()
        except _UnreadableError:
            return mark.end()

    def _object(self, source: JsonSource, position: int, depth: int) -> tuple[dict[str, Any], int]:
        """The object after its opening brace, and where it ends."""
        value: dict[str, Any] = {}
        position = _end(_SPACE, source, position)
        while not source.startswith("}", position):
            key, position = self._key(source, position)
            if not source.startswith(":", position):
                raise _unreadable(source, position)
            value[key], position = self._value(source, position + 1, depth)
            position = _end(_SEPARATOR, source, position)
        return value, position + 1

    def _key(self, source: JsonSource, position: int) -> tuple[str, int]:
        if source.startswith(self.quote, position):
            text, position = self._string(source, position)
            return text, _end(_SPACE, source, position)
        key = _KEY.match(source, position)
        if key is None:
            raise _unreadable(source, position)
        return key[0].strip(), key.end()

    def _list(self, source: JsonSource, position: int, depth: int) -> tuple[list[Any], int]:
        value: list[Any] = []
        position = _end(_SPACE, source, position)
        while not source.startswith("]", position):
            item, position = self._value(source, position, depth)
            value.append(item)
            position = _end(_SEPARATOR, source, position)
        return value, position + 1

    def _value(self, source: JsonSource, position: int, depth: int) -> tuple[Any, int]:
        position = _end(_SPACE, source, position)
        if source.startswith(self.quote, position):
            return self._string(source, position)
        if depth > MAX_DEPTH:
            raise _UnreadableError(position)
        if source.startswith("{", position):
            return self._object(source, position + 1, depth + 1)
        if source.startswith("[", position):
            return self._list(source, position + 1, depth + 1)
        word = _WORD.match(source, position)
        text = word[0].strip() if word else ""
        if word is None or not text or word.end() == len(source):
            raise _unreadable(source, position)
        if text == "None":  # as the first templates of Gemma 4 write it
            return None, word.end()
        match = decode(JsonSource(text), 0)
        return (match.value if match and match.end == len(text) else text), word.end()

    def _string(self, source: JsonSource, position: int) -> tuple[str, int]:
        start = position + len(self.quote)
        end = source.find(self.quote, start)
        if end < 0:
            need_more(source)  # a closing mark so far may be inside the string
            raise _UnreadableError(start)
        return source[start:end], end + len(self.quote)

    def render(self, content: str, calls: Sequence[ToolCall]) -> str:
        blocks = "".join(f"{self.opening}{self._write_call(call)}{self.closing}" for call in calls)
        return join(content, blocks)

    def _write_call(self, call: ToolCall) -> str:
        if isinstance(call.arguments, str):
            return f"call:{call.name}{call.arguments}" if call.name else call.arguments
        return f"call:{call.name}{self._write(call.arguments)}"

    def _write(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self.quote}{value}{self.quote}"
        if isinstance(value, dict):
            inside = (f"{self._write_key(key)}:{self._write(item)}" for key, item in value.items())
            return f"{{{','.join(inside)}}}"
        if isinstance(value, list):
            return f"[{','.join(map(self._write, value))}]"
        return json.dumps(value)

    def _write_key(self, key: str) -> str:
        return key if re.fullmatch(r"[^\s:{}\[\],<]+", key) else f"{self.quote}{key}{self.quote}"

    def block_format(self) -> BlockFormat:
        return BlockFormat(
            {self.opening: self.read}, (self.closing,), dropped=(self.response,), skip=self._skip, name=_HEADER
        )


def _end(pattern: re.Pattern[str], source: JsonSource, position: int) -> int:
    match = pattern.match(source, position)
    end = match.end() if match else position
    if end == len(source):
        raise _unreadable(source, end)
    return end


def _unreadable(source: JsonSource, position: int) -> _UnreadableError:
    if len(source) - position < 16:
        need_more(source)
    return _UnreadableError(position)


GEMMA4 = GemmaCalls("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>")
FUNCTIONGEMMA = GemmaCalls("<start_function_call>", "<end_function_call>", "<escape>", "<start_function_response>")
