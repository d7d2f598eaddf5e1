"""Formats that write each argument between tags of its own, like XML but without its escapes.

qwen3_coder (Qwen3-Coder, Qwen3.5 and later, Nemotron 3):
    `<tool_call><function=NAME><parameter=KEY>…</parameter></function></tool_call>`
seed_oss (Seed-OSS):
    the same in `<seed:tool_call>`
glm (GLM-4.5 and later):
    `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>…</arg_value></tool_call>`
minimax (MiniMax M2):
    `<minimax:tool_call><invoke name="NAME"><parameter name="KEY">…</parameter></invoke></minimax:tool_call>`
deepseek_v32 (DeepSeek V3.2):
    the same with `<｜DSML｜…>` tags, in which each parameter says whether it is a string

Values have no type. Like the formats' own parsers, a value that is valid JSON is decoded and anything else is a
string, so `5` is a number; `"5"`, with quotes, is a string. Python's `True`, `False` and `None` are read too: Qwen3.5's
template writes them. If the tools' schemas are given (`parse_for_tools`) and one says that a parameter is a string, its
text is kept as it is (unless it is in quotes). A call that breaks keeps its name and its text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolwise.messages import ToolCall
from toolwise.rollout.parsers.blocks import Block, BlockFormat, Closing, skip_closed
from toolwise.rollout.parsers.json_calls import (
    THOUGHT_CLOSINGS,
    THOUGHT_OPENINGS,
    JsonSource,
    ParsedReply,
    RawCall,
    any_of,
    decode,
    is_storable,
    join,
    need_more,
)

_FLAGS = re.IGNORECASE | re.ASCII
_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_STRING = frozenset({"string"})
_NOT_PRESENT = object()
Tools = Sequence[dict[str, Any]] | None
ParameterTypes = Mapping[tuple[str, str], frozenset[str]]
"""The JSON types that a tool's schema allows for (tool, parameter)."""


@dataclass(frozen=True, slots=True)
class XmlCalls:
    """`opening` (`function` (`parameter` value `parameter_end`)… `function_end`)… `closing`."""

    opening: str
    closing: str
    function: str
    """Pattern with the group `name`."""
    function_end: str
    """Empty if the block ends with its only function."""
    parameter: str
    """Pattern with the group `key`; a group `string` is "true" if the value is a string."""
    parameter_end: str
    templates: tuple[str, str]
    """How a function and a parameter start, with {name} and {key}."""
    lines: bool = False
    """Whether a value is on lines of its own: one newline on each side does not belong to it."""
    _function: re.Pattern[str] = field(init=False)
    _parameter: re.Pattern[str] = field(init=False)
    _function_end: re.Pattern[str] = field(init=False)
    _value_end: re.Pattern[str] = field(init=False)
    _closing_start: re.Pattern[str] = field(init=False)
    _marks: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        after = any_of(mark for mark in (self.function_end, self.closing) if mark)
        marks = [self.opening, self.closing, self.parameter_end, *THOUGHT_OPENINGS, *THOUGHT_CLOSINGS]
        patterns = {
            "_function": rf"\s*{self.function}",
            "_parameter": rf"\s*{self.parameter}",
            "_function_end": rf"\s*{re.escape(self.function_end)}",
            # The text of a value may hold the closing tag: it ends where the next parameter or the end follows.
            "_value_end": rf"{re.escape(self.parameter_end)}(?=\s*+(?:{self.parameter}|{after}|\Z))",
            "_closing_start": rf"\s*(?:{re.escape(self.closing[:2])}|{re.escape(self.opening)})",
            "_marks": any_of(marks),
        }
        for name, pattern in patterns.items():
            object.__setattr__(self, name, re.compile(pattern, _FLAGS))

    def block_format(self, types: ParameterTypes | None = None) -> BlockFormat:
        def read(source: JsonSource, start: int) -> Block:
            return self._read(source, start, types or {})

        skip = skip_closed(rf"\s*{self.function}", self.closing, [self.opening])
        name = re.compile(rf"\s*{self.function}(?=\s*[<\n])", _FLAGS)
        return BlockFormat({self.opening: read}, (self.closing,), skip=skip, name=name)

    def render(self, content: str, calls: Sequence[ToolCall]) -> str:
        return join(content, *(self._write(call) for call in calls))

    def _read(self, source: JsonSource, start: int, types: ParameterTypes) -> Block:
        calls: list[RawCall] = []
        position = start
        while True:
            function = self._function.match(source, position)
            if function is None:
                end = Closing(self.closing, (self.opening,)).match(source, position) if calls else None
                if end is not None:
                    return Block(calls, end)
                bad = Closing(self.closing).bad(source, position, position)
                return Block([*calls, *bad.calls], bad.end)
            name, position = function["name"].strip(), function.end()
            arguments_start = position
            arguments, position, complete = self._read_parameters(source, name, position, types)
            if not complete or not is_storable(arguments):
                bad = Closing(self.closing).bad(source, arguments_start, position, name)
                return Block([*calls, *bad.calls], bad.end)
            calls.append((name, arguments))

    def _read_parameters(
        self, source: JsonSource, name: str, position: int, types: ParameterTypes
    ) -> tuple[dict[str, Any], int, bool]:
        """The arguments, where they end, and whether the function was closed."""
        arguments: dict[str, Any] = {}
        while parameter := self._parameter.match(source, position):
            key = parameter["key"].strip()
            value_end = self._value_end.search(source, parameter.end())
            if value_end is None or value_end.end() == len(source):
                need_more(source)
            if value_end is None:
                return arguments, len(source), False
            text = source[parameter.end() : value_end.start()]
            typed = parameter.groupdict().get("string")
            allowed = types.get((name, key)) if typed is None else frozenset({"string" if typed == "true" else "json"})
            arguments[key] = self._to_value(text, allowed, decode_quotes=typed is None)
            position = value_end.end()
        end = self._function_end.match(source, position) if self.function_end else None
        if end:
            return arguments, end.end(), True
        # A block that was cut off here may lack arguments: unlike after complete JSON, its closing mark must follow.
        closed = Closing(self.closing, (self.opening,)).match(source, position)
        return arguments, position, closed is not None and bool(self._closing_start.match(source, position))

    def _to_value(self, text: str, allowed: frozenset[str] | None, *, decode_quotes: bool) -> Any:
        if self.lines:
            text = text.removeprefix("\n").removesuffix("\n")
        is_string = allowed == _STRING
        if is_string and not decode_quotes:
            return text
        value = _decode_all(text)
        keeps_text = value is _NOT_PRESENT or (is_string and not isinstance(value, str))
        return text if keeps_text else value

    def _write(self, call: ToolCall) -> str:
        start, parameter = self.templates
        if isinstance(call.arguments, str):
            inside = f"{start.format(name=call.name)}{call.arguments}" if call.name else call.arguments
            return f"{self.opening}{inside}{self.closing}"
        newline = "\n" if self.lines else ""
        parameters = []
        for key, value in call.arguments.items():
            text = self._value_text(value)
            parameters.append(parameter.format(key=key, string="true" if text is value else "false"))
            parameters.append(f"{newline}{text}{newline}{self.parameter_end}\n")
        end = f"{self.function_end}\n" if self.function_end else ""
        return f"{self.opening}{start.format(name=call.name)}{''.join(parameters)}{end}{self.closing}"

    def _value_text(self, value: Any) -> str:
        """A string as it is, if it is read back as the same string; everything else as JSON, without any mark."""
        if isinstance(value, str) and not self._marks.search(value):
            says_type = "{string}" in self.templates[1]
            if says_type or _decode_all(value) is _NOT_PRESENT:
                return value
        return json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")


def _decode_all(text: str) -> Any:
    """The JSON value that the whole text is, without a code fence."""
    if text.strip() in _PYTHON_WORDS:
        return _PYTHON_WORDS[text.strip()]
    source = JsonSource(text.strip())
    match = decode(source, 0) if not source.startswith("```") else None
    return match.value if match and match.end == len(source) and is_storable(match.value) else _NOT_PRESENT


def parameter_types(tools: Tools) -> ParameterTypes:
    """The types in the schemas of `tools` (OpenAI's form); a parameter without a plain type is left out."""
    types: dict[tuple[str, str], frozenset[str]] = {}
    for tool in tools or ():
        function = tool.get("function", tool)
        properties = (function.get("parameters") or {}).get("properties") or {}
        for key, schema in properties.items():
            written = schema.get("type") if isinstance(schema, dict) else None
            if isinstance(written, str | list):
                types[function.get("name", ""), key] = frozenset([written] if isinstance(written, str) else written)
    return types


def parse_typed(calls: XmlCalls, text: str, tools: Tools) -> ParsedReply:
    """Parse with the types in the tools' schemas."""
    return calls.block_format(parameter_types(tools)).parse(text)


_KEY = r"(?P<key>[^<>\n]{0,200})"
_QUOTED = r'"(?P<{}>[^"<>\n]{{0,200}})"'

QWEN3_CODER = XmlCalls(
    "<tool_call>",
    "</tool_call>",
    function=r"<function=(?P<name>[^<>\n]{1,200})>",
    function_end="</function>",
    parameter=f"<parameter={_KEY}>",
    parameter_end="</parameter>",
    templates=("\n<function={name}>\n", "<parameter={key}>"),
    lines=True,
)
SEED_OSS = XmlCalls(
    "<seed:tool_call>",
    "</seed:tool_call>",
    function=r"<function=(?P<name>[^<>\n]{1,200})>",
    function_end="</function>",
    parameter=f"<parameter={_KEY}>",
    parameter_end="</parameter>",
    templates=("\n<function={name}>\n", "<parameter={key}>"),
)
GLM = XmlCalls(
    "<tool_call>",
    "</tool_call>",
    function=r"(?P<name>[^\s<>{}\[\]\"]{1,200})(?=\s*(?:<|\Z))",
    function_end="",
    parameter=rf"<arg_key>{_KEY}</arg_key>\s*<arg_value>",
    parameter_end="</arg_value>",
    templates=("{name}\n", "<arg_key>{key}</arg_key>\n<arg_value>"),
)
MINIMAX = XmlCalls(
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    function=rf"<invoke name={_QUOTED.format('name')}>",
    function_end="</invoke>",
    parameter=rf"<parameter name={_QUOTED.format('key')}>",
    parameter_end="</parameter>",
    templates=('\n<invoke name="{name}">\n', '<parameter name="{key}">'),
)
DEEPSEEK_V32 = XmlCalls(
    "<｜DSML｜function_calls>",
    "</｜DSML｜function_calls>",
    function=rf"<｜DSML｜invoke name={_QUOTED.format('name')}>",
    function_end="</｜DSML｜invoke>",
    parameter=rf'<｜DSML｜parameter name={_QUOTED.format("key")}(?: string="(?P<string>true|false)")?>',
    parameter_end="</｜DSML｜parameter>",
    templates=('\n<｜DSML｜invoke name="{name}">\n', '<｜DSML｜parameter name="{key}" string="{string}">'),
)
