"""Formats that write a list of calls, or a single call, as JSON behind a mark.

granite (Granite 3), phi4 (Phi-4-mini):
    `<|tool_call|>[{"name": …, "arguments": {…}}]`, for Phi with `<|/tool_call|>` after it, or, with its first template,
    `functools[{"name": …, "arguments": {…}}]`
cohere (Command R7B and A):
    `<|START_ACTION|>[{"tool_call_id": "0", "tool_name": …, "parameters": {…}}]<|END_ACTION|>`
hunyuan (Hunyuan A13B, Jamba):
    `<tool_calls>[{"name": …, "arguments": {…}}]</tool_calls>`
nemotron (Nemotron Nano 2):
    `<TOOLCALL>[{"name": …, "arguments": {…}}]</TOOLCALL>`
internlm (InternLM 2.5):
    `<|action_start|><|plugin|>{"name": …, "parameters": {…}}<|action_end|>`

A list that holds anything but calls is one bad call: otherwise its text would be repeated in each of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toolwise.messages import ToolCall
from toolwise.rollout.parsers.blocks import Block, BlockFormat, Closing, Reader
from toolwise.rollout.parsers.json_calls import (
    JsonSource,
    RawCall,
    decode,
    dump_call,
    join,
    skip_values,
    to_call,
)

_LIST = "[{"


@dataclass(frozen=True, slots=True)
class JsonBlocks:
    """`opening` JSON `closing`. The closing mark may be missing if `loose`; then text after the JSON is content."""

    opening: str
    closing: str
    loose: bool = False
    name_key: str = "name"
    arguments_key: str = "arguments"
    listed: bool = True
    """Whether all calls are written as one list; else each in a block of its own."""
    dropped: tuple[str, ...] = ()
    bare: str = ""
    """A word that starts a list of calls without marks; only read where `[{` follows."""

    def _read_bare(self, source: JsonSource, start: int) -> Block:
        start -= len(_LIST)
        match = decode(source, start)
        if match is None:
            return Closing(self.closing, (self.opening,)).bad(source, start, start)
        return Block(self._to_calls(match.value, source[start : match.end].strip()), match.end)

    def _skip(self, source: JsonSource, mark: re.Match[str]) -> int:
        position = mark.end() - (len(_LIST) if mark[0].endswith(_LIST) else 0)
        return max(skip_values(source, position), mark.end())

    def read(self, source: JsonSource, start: int) -> Block:
        match = decode(source, start)
        end = Closing(self.closing, (self.opening,)).match(source, match.end) if match else None
        if match and end is None and self.loose:
            end = match.end
        if match is None or end is None:
            return Closing(self.closing).bad(source, start, match.end if match else start)
        return Block(self._to_calls(match.value, source[start : match.end].strip()), end)

    def _to_calls(self, value: Any, text: str) -> list[RawCall]:
        values = value if isinstance(value, list) and value else [value]
        calls = [to_call(item, "", self.name_key) for item in values]
        return [("", text)] if ("", "") in calls else calls

    def render(self, content: str, calls: Sequence[ToolCall]) -> str:
        if not calls:
            return content
        written = [dump_call(c.name, c.arguments, self.arguments_key, self.name_key) for c in calls]
        groups = [f"[{', '.join(written)}]"] if self.listed else written
        return join(content, *(f"{self.opening}{group}{self.closing}" for group in groups))

    def block_format(self) -> BlockFormat:
        name = re.compile(
            rf'\s*+(?:(?:\[\s*+)?+\{{)?+(?:[^{{}}\[\]]{{0,100}},)?\s*"{self.name_key}"\s*:\s*"(?P<name>[^"\\]+)"'
        )
        triggers = ("]", "}") if self.loose else (self.closing,)
        readers: dict[str, Reader] = {self.opening: self.read}
        if self.bare:
            readers[self.bare + _LIST] = self._read_bare
        return BlockFormat(readers, triggers, dropped=self.dropped, skip=self._skip, name=name)


PHI4 = JsonBlocks("<|tool_call|>", "<|/tool_call|>", loose=True, bare="functools")
"""Also Granite 3's, which has no closing mark."""
COHERE = JsonBlocks(
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    name_key="tool_name",
    arguments_key="parameters",
    dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
)
HUNYUAN = JsonBlocks("<tool_calls>", "</tool_calls>")
NEMOTRON = JsonBlocks("<TOOLCALL>", "</TOOLCALL>")
INTERNLM = JsonBlocks("<|action_start|><|plugin|>", "<|action_end|>", arguments_key="parameters", listed=False)
