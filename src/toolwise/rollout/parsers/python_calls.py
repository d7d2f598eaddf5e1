"""Formats that write calls as Python code between marks.

lfm2 (LFM2):
    `<|tool_call_start|>[f(a=1), g()]<|tool_call_end|>`
olmo3 (Olmo 3):
    `<function_calls>`, a call per line, `</function_calls>`
smollm3 (SmolLM3):
    `<code>f(a=1)</code>`, or Hermes' blocks
gemma3 (Gemma 3):
    a code fence named `tool_code`; `print(f(a=1))` is f's call

Arguments are literals, passed by name; `true`, `false` and `null` are read too. Nothing is run: other code is a bad
call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from toolwise.messages import ToolCall
from toolwise.rewards.library.calls import parse_python_calls
from toolwise.rollout.parsers.blocks import Block, BlockFormat, skip_closed, skip_json
from toolwise.rollout.parsers.hermes import CLOSING_TAG, JSON_NAME, OPENING_TAG, read_hermes
from toolwise.rollout.parsers.json_calls import (
    JsonSource,
    RawCall,
    decode,
    is_storable,
    join,
    need_more,
    to_call,
)

_FLAGS = re.IGNORECASE | re.ASCII
_STRING = r""""(?:[^"\\\n]|\\.)*+"|'(?:[^'\\\n]|\\.)*+'"""
_JSON_WORDS = {"true": "True", "false": "False", "null": "None"}
_STRING_OR_WORD = re.compile(rf"{_STRING}|\\.|\b(true|false|null)\b(?!\s*=[^=])", re.DOTALL)
_CALL_START = r"\s*+(?:\[\s*+)?+(?:print\()?(?P<name>(?!print\()[A-Za-z_][\w.]*)\("
_PRINT = re.compile(r"^([ \t]*)print\((.*)\)[ \t]*$", re.MULTILINE)


def read_python(code: str) -> list[RawCall]:
    """The calls in Python text; one bad call with the text if it holds anything else."""
    try:
        return [(call.name, _to_json_arguments(call)) for call in parse_python_calls(_to_python(code))] or [("", code)]
    except (ValueError, TypeError, RecursionError):  # TypeError: a literal that is not JSON, such as a set
        return [("", code)]


def _to_python(code: str) -> str:
    return _STRING_OR_WORD.sub(lambda match: _JSON_WORDS.get(match[1], match[0]) if match[1] else match[0], code)


def _to_json_arguments(call: ToolCall) -> dict[str, Any]:
    """The arguments as JSON: tuples become lists, keys become strings."""
    arguments: dict[str, Any] = json.loads(json.dumps(call.arguments, allow_nan=False))
    if not is_storable(arguments):
        raise ValueError("the arguments cannot be stored")
    return arguments


def dump_python(calls: Sequence[ToolCall]) -> list[str]:
    """Calls as Python; one that could not be parsed as it was written."""
    return [call.arguments if isinstance(call.arguments, str) else _dump_call(call) for call in calls]


def _dump_call(call: ToolCall) -> str:
    assert isinstance(call.arguments, dict)
    arguments = ", ".join(f"{key}={value!r}" for key, value in call.arguments.items())
    # These characters can only be inside strings here; escaped, no string can hold a mark.
    arguments = arguments.replace("<", "\\x3c").replace("`", "\\x60")
    return f"{call.name}({arguments})"


@cache
def _closing_patterns(mark: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """The closing mark among the strings of the code, and anywhere."""
    closing = re.escape(mark)
    tokens = rf"{_STRING}|\\.|(?P<closing>{closing})|(?P<quote>[\"'])"
    return re.compile(tokens, _FLAGS | re.DOTALL), re.compile(closing, _FLAGS)


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """`opening` code `closing`; a closing mark in a string of the code does not count."""

    opening: str
    closing: str
    listed: bool = False
    """Whether the calls are written as a list, else one per line."""
    prints: bool = False
    """Whether a call may stand in `print(…)`."""

    def read(self, source: JsonSource, start: int) -> Block:
        end = self._find_closing(source, start)
        if end is None:
            return Block([("", source[start:].strip())], len(source))
        return Block(self._to_calls(source[start : end.start()].strip()), end.end())

    def _find_closing(self, source: JsonSource, start: int) -> re.Match[str] | None:
        tokens, closing = _closing_patterns(self.closing)
        for token in tokens.finditer(source, start):
            if token["closing"]:
                return token
            if token["quote"] and source.find("\n", token.end()) < 0:
                need_more(source)  # the string may end later
        need_more(source)
        return closing.search(source, start)

    def _to_calls(self, code: str) -> list[RawCall]:
        if code.startswith(("{", "[{")):
            match = decode(JsonSource(code), 0)
            if match and match.end == len(code):
                values = match.value if isinstance(match.value, list) else [match.value]
                calls = [to_call(value, "") for value in values]
                return [("", code)] if ("", "") in calls else calls
        return read_python(_PRINT.sub(r"\1\2", code) if self.prints else code)

    def render(self, content: str, calls: Sequence[ToolCall]) -> str:
        if not calls:
            return content
        written = dump_python(calls)
        inside = f"[{', '.join(written)}]" if self.listed else "\n" + "\n".join(written) + "\n"
        return join(content, f"{self.opening}{inside}{self.closing}")

    def block_format(self) -> BlockFormat:
        skip = skip_closed(_CALL_START, self.closing, [self.opening])
        return BlockFormat({self.opening: self.read}, (self.closing,), skip=skip, name=re.compile(_CALL_START))


LFM2 = PythonCalls("<|tool_call_start|>", "<|tool_call_end|>", listed=True)
OLMO3 = PythonCalls("<function_calls>", "</function_calls>")
GEMMA3 = PythonCalls("```tool_code", "```", prints=True)
_CODE = PythonCalls("<code>", "</code>", prints=True)

_CODE_BLOCKS = _CODE.block_format()


def _skip_smollm3(source: JsonSource, mark: re.Match[str]) -> int:
    return (_CODE_BLOCKS.skip if mark[0].lower() == _CODE.opening else skip_json)(source, mark)


SMOLLM3 = BlockFormat(
    {OPENING_TAG: read_hermes, _CODE.opening: _CODE.read},
    (CLOSING_TAG, _CODE.closing),
    skip=_skip_smollm3,
    name=re.compile(rf"{JSON_NAME.pattern}|{_CALL_START.replace('?P<name>', '?P<named>')}"),
)
