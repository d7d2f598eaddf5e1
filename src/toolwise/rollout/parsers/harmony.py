"""Formats that send each message of a turn to a channel or a recipient.

gpt_oss (OpenAI's gpt-oss, "harmony"):
    `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>`
muse_glimmer (Muse Glimmer):
    ` to=NAME<|message|><atem:function_calls><atem:invoke name="NAME">…</atem:invoke></atem:function_calls>`

Thoughts are messages too (channel `analysis`; to `self`): they are returned as the reply's reasoning, since templates
reject them in the content. Messages to the user (the channels `final` and `commentary`) are the content.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from toolwise.messages import ToolCall
from toolwise.rollout.parsers.blocks import Block, BlockFormat
from toolwise.rollout.parsers.json_calls import JsonSource, ParsedReply, dump_arguments, join, need_more, skip_values
from toolwise.rollout.parsers.named_calls import read_arguments
from toolwise.rollout.parsers.xml_calls import XmlCalls

_FLAGS = re.IGNORECASE | re.ASCII
_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_TEXT = r"[^<]{0,300}"
_HEADER = re.compile(rf"{_TEXT}(?:<\|(?:channel|constrain)\|>{_TEXT}){{0,3}}<\|message\|>", _FLAGS)
_RECIPIENT = re.compile(r"\bto=(?P<name>[^\s<]+)")
_ANALYSIS = re.compile(r"(?:\A|<\|channel\|>)\s*analysis\b", _FLAGS)
_UNMARKED = re.compile(r"\s*to=")
"""The prompt ends with `<|start|>assistant`: the recipient may come first."""


def _read_harmony(source: JsonSource, start: int) -> Block:
    header = _find_header(source, start)
    if header is None:
        return Block((), start)
    recipient = _RECIPIENT.search(header[0])
    if recipient:
        name = recipient["name"].removeprefix("functions.")
        return read_arguments(source, name, header.end(), "<|call|>", (_START, "<|end|>", "<|return|>"))
    if _ANALYSIS.search(header[0]):
        return _read_thought(source, header.end(), _HARMONY_END)
    return Block((), header.end())


_HARMONY_END = re.compile(r"<\|(?:end|return|call)\|>|(?=<\|start\|>|<\|channel\|>)", _FLAGS)
_MUSE_END = re.compile(r"<\|(?:eom|eot)\|>|(?=<\|start\|>)", _FLAGS)


def _read_muse(source: JsonSource, start: int) -> Block:
    header = _find_header(source, start)
    if header is None:
        return Block((), start)
    recipient = _RECIPIENT.search(header[0])
    if recipient and recipient["name"] == "self":
        return _read_thought(source, header.end(), _MUSE_END)
    return Block((), header.end())


def _find_header(source: JsonSource, start: int) -> re.Match[str] | None:
    header = _HEADER.match(source, start)
    if header is None and len(source) - start < 1000:
        need_more(source)
    return header


def _skip_harmony(source: JsonSource, mark: re.Match[str]) -> int:
    header = _HEADER.match(source, mark.end())
    end = skip_values(source, header.end()) if header else mark.end()
    return end if header and end > header.end() else mark.end()


def _read_thought(source: JsonSource, start: int, ending: re.Pattern[str]) -> Block:
    end = ending.search(source, start)
    if end is None:
        need_more(source)
        return Block((), len(source), source[start:].strip())
    return Block((), end.end(), source[start : end.start()].strip())


_ATEM = XmlCalls(
    "<atem:function_calls>",
    "</atem:function_calls>",
    function=r'<atem:invoke name="(?P<name>[^"<>\n]{1,200})">',
    function_end="</atem:invoke>",
    parameter=r'<atem:parameter name="(?P<key>[^"<>\n]{0,200})">',
    parameter_end="</atem:parameter>",
    templates=('\n<atem:invoke name="{name}">\n', '<atem:parameter name="{key}">'),
)
ATEM_BLOCKS = _ATEM.block_format()

GPT_OSS = BlockFormat(
    {_START: _read_harmony, _CHANNEL: _read_harmony},
    ("<|end|>", "<|call|>", "<|return|>", _START, _MESSAGE),
    dropped=("<|end|>", "<|return|>", "<|call|>"),
    skip=_skip_harmony,
    name=re.compile(
        rf"(?={_HEADER.pattern})(?:{_TEXT}<\|channel\|>)?[^<]{{0,300}}?\bto=(?:functions\.)?(?P<name>[^\s<]+)[\s<]",
        _FLAGS,
    ),
    thoughts=False,
    starts=("t",),
)
MUSE_GLIMMER = BlockFormat(
    {_START: _read_muse, **ATEM_BLOCKS.readers},
    ("<|eom|>", "<|eot|>", _START, _MESSAGE, *ATEM_BLOCKS.triggers),
    dropped=("<|eom|>", "<|eot|>"),
    name=ATEM_BLOCKS.name,
    thoughts=False,
    starts=("t",),
)


def parse_gpt_oss(text: str) -> ParsedReply:
    """A call whose arguments are not one JSON object keeps its name and their text."""
    return GPT_OSS.parse(_START + text if _UNMARKED.match(text) else text)


def render_gpt_oss(content: str, calls: Sequence[ToolCall]) -> str:
    written = (
        f"{_CHANNEL}commentary to=functions.{call.name} <|constrain|>json{_MESSAGE}{dump_arguments(call.arguments)}"
        for call in calls
    )
    return join(content, f"<|call|>{_START}assistant".join(written) + "<|call|>" if calls else "")


def parse_muse_glimmer(text: str) -> ParsedReply:
    return MUSE_GLIMMER.parse(_START + text if _UNMARKED.match(text) else text)


def render_muse_glimmer(content: str, calls: Sequence[ToolCall]) -> str:
    written = (f"{_START}assistant to={call.name}{_MESSAGE}{_ATEM.render('', [call])}" for call in calls)
    return join(content, "<|eom|>".join(written))
