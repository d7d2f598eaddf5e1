"""Formats that write a call's name and then its arguments as JSON, between marks.

deepseek_v3 (DeepSeek V3, R1):
    `<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`, a newline, the arguments in a JSON fence, `<｜tool▁call▁end｜>`
deepseek_v31 (DeepSeek V3.1):
    `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`
kimi_k2 (Kimi K2):
    `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`

All calls of a turn stand between two more marks, which mean nothing by themselves. A call whose arguments cannot be
read keeps its name and their text. The two DeepSeek formats are read alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from toolwise.messages import ToolCall
from toolwise.rollout.parsers.blocks import Block, BlockFormat, Closing
from toolwise.rollout.parsers.json_calls import (
    JsonSource,
    decode,
    dump_arguments,
    is_storable,
    join,
    skip_values,
)

_FLAGS = re.IGNORECASE | re.ASCII
_NAME = r"[^\s<>{}\[\]\"`]{1,200}"


@dataclass(frozen=True, slots=True)
class NamedCalls:
    """`section[0]` (`opening` header {…} `closing`)… `section[1]`."""

    section: tuple[str, str]
    opening: str
    closing: str
    header: re.Pattern[str]
    """What is between the opening mark and the arguments, with the group `name`."""
    write: Callable[[int, str, str], str]
    """A call without its opening and closing mark, from its index, its name and its arguments."""

    def read(self, source: JsonSource, start: int) -> Block:
        header = self.header.match(source, start)
        if header is None:
            return Closing(self.closing, self.section[1:]).bad(source, start, start)
        return read_arguments(source, header["name"], header.end(), self.closing, (self.opening, self.section[1]))

    def skip(self, source: JsonSource, mark: re.Match[str]) -> int:
        header = self.header.match(source, mark.end())
        end = skip_values(source, header.end()) if header else mark.end()
        return end if header and end > header.end() else mark.end()

    def render(self, content: str, calls: Sequence[ToolCall]) -> str:
        if not calls:
            return content
        written = [self.write(i, c.name, dump_arguments(c.arguments)) for i, c in enumerate(calls)]
        blocks = "".join(self.opening + call + self.closing for call in written)
        return join(content, self.section[0] + blocks + self.section[1])

    def block_format(self) -> BlockFormat:
        name = re.compile(rf"{self.header.pattern}(?=[{{`])", _FLAGS)
        return BlockFormat({self.opening: self.read}, (self.closing,), dropped=self.section, skip=self.skip, name=name)


def read_arguments(source: JsonSource, name: str, start: int, closing: str, others: tuple[str, ...]) -> Block:
    """One JSON object and nothing else before the closing mark (or one of `others`); otherwise the text of it."""
    match = decode(source, start)
    end = Closing(closing, others).match(source, match.end) if match else None
    if match is None or end is None:
        return Closing(closing, others[1:]).bad(source, start, match.end if match else start, name)
    valid = isinstance(match.value, dict) and is_storable(match.value)
    return Block([(name, match.value if valid else source[start : match.end].strip())], end)


_DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_SEPARATOR = "<｜tool▁sep｜>"
_DEEPSEEK_HEADER = re.compile(
    rf"\s*(?P<typed>function\s*{_SEPARATOR}\s*(?={_NAME}\s))?(?P<name>{_NAME})(?(typed)\s+|\s*{_SEPARATOR}\s*)", _FLAGS
)
_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
_KIMI_HEADER = re.compile(rf"\s*(?:functions\.)?(?P<name>{_NAME}?)(?::\d+)?\s*{re.escape(_KIMI_ARGUMENTS)}\s*", _FLAGS)

DEEPSEEK_V3 = NamedCalls(
    _DEEPSEEK_SECTION,
    *_DEEPSEEK_CALL,
    header=_DEEPSEEK_HEADER,
    write=lambda i, name, arguments: f"function{_SEPARATOR}{name}\n```json\n{arguments}\n```",
)
DEEPSEEK_V31 = NamedCalls(
    _DEEPSEEK_SECTION,
    *_DEEPSEEK_CALL,
    header=_DEEPSEEK_HEADER,
    write=lambda i, name, arguments: f"{name}{_SEPARATOR}{arguments}",
)
KIMI_K2 = NamedCalls(
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    header=_KIMI_HEADER,
    write=lambda i, name, arguments: f"functions.{name}:{i}{_KIMI_ARGUMENTS}{arguments}",
)
