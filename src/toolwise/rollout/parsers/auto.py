"""Detects the tool-call format of each text by its first mark."""

from __future__ import annotations

import re
from collections.abc import Callable

from toolwise.rollout.parsers.action import parse_action
from toolwise.rollout.parsers.blocks import BlockFormat, CallTable
from toolwise.rollout.parsers.gemma import FUNCTIONGEMMA, GEMMA4
from toolwise.rollout.parsers.harmony import ATEM_BLOCKS, GPT_OSS, parse_gpt_oss, parse_muse_glimmer
from toolwise.rollout.parsers.hermes import OPENING_TAG, parse_hermes
from toolwise.rollout.parsers.json_blocks import COHERE, HUNYUAN, INTERNLM, NEMOTRON, PHI4
from toolwise.rollout.parsers.json_calls import (
    JsonSource,
    ParsedReply,
    any_of,
    decode,
    mark_pattern,
    skip_values,
    split_reasoning,
)
from toolwise.rollout.parsers.llama3 import GEMMA3_BLOCKS, PYTHONIC, TAG, begins_bare, parse_gemma3, parse_llama3
from toolwise.rollout.parsers.llama3 import MARK as LLAMA3
from toolwise.rollout.parsers.mistral import MISTRAL
from toolwise.rollout.parsers.named_calls import DEEPSEEK_V31, KIMI_K2
from toolwise.rollout.parsers.python_calls import GEMMA3, LFM2, OLMO3
from toolwise.rollout.parsers.rlla import parse_rlla
from toolwise.rollout.parsers.xml_calls import DEEPSEEK_V32, GLM, MINIMAX, QWEN3_CODER, SEED_OSS

_TABLES: tuple[CallTable, ...] = (
    DEEPSEEK_V31, KIMI_K2, COHERE, PHI4, HUNYUAN, NEMOTRON, INTERNLM, DEEPSEEK_V32, MINIMAX, SEED_OSS, LFM2, OLMO3,
    GEMMA4, FUNCTIONGEMMA,
)  # fmt: skip
_BLOCKS: tuple[BlockFormat, ...] = (MISTRAL, *(table.block_format() for table in _TABLES))
_QWEN3_CODER, _GLM = QWEN3_CODER.block_format(), GLM.block_format()
_PARSERS: dict[str, Callable[[str], ParsedReply]] = {
    **{mark.lower(): form.parse for form in _BLOCKS for mark in (*form.readers, *form.dropped)},
    "<|channel|>": parse_gpt_oss,
    **dict.fromkeys(ATEM_BLOCKS.readers, parse_muse_glimmer),
    OPENING_TAG: parse_hermes,
    "<action>": parse_action,
    TAG: parse_llama3,
    GEMMA3.opening: parse_gemma3,
}
_SKIPS = {mark.lower(): form.skip for form in (*_BLOCKS, ATEM_BLOCKS, GPT_OSS, GEMMA3_BLOCKS) for mark in form.readers}
_MARKS = mark_pattern(f"{any_of(_PARSERS)}|{LLAMA3}")
_FIRST = re.compile(any_of(_PARSERS), re.IGNORECASE | re.ASCII)
_FUNCTION = re.compile(r"\s*<function=", re.IGNORECASE)
_ARGUMENT = re.compile(r"\s*[^\s<>{}\[\]\"]{1,200}\s*<arg_key>", re.IGNORECASE)


def parse_auto(text: str) -> ParsedReply:
    """Parse as the format whose mark comes first after the thought; text without a mark is only stripped."""
    return _format_of(text)(text)


def _format_of(text: str) -> Callable[[str], ParsedReply]:
    if PYTHONIC.match(text):
        return parse_llama3
    _, body = split_reasoning(text, _MARKS, _skip)
    if PYTHONIC.match(body) or begins_bare(body):
        return parse_llama3
    first = _FIRST.search(body)
    if first is None:
        return parse_hermes
    mark = first[0].lower()
    return _in_tool_call(body, first.end()) if mark == OPENING_TAG else _PARSERS[mark]


def _in_tool_call(body: JsonSource, start: int) -> Callable[[str], ParsedReply]:
    """`<tool_call>` starts the blocks of several formats, which differ in what follows."""
    if _FUNCTION.match(body, start):
        return _QWEN3_CODER.parse
    if _ARGUMENT.match(body, start):
        return _GLM.parse
    match = decode(body, start)
    is_rlla = match and isinstance(match.value, dict) and "arguments" not in match.value
    return parse_rlla if is_rlla else parse_hermes


def _skip(source: JsonSource, mark: re.Match[str]) -> int:
    if mark[0].lower() == OPENING_TAG:
        form = _QWEN3_CODER if _FUNCTION.match(source, mark.end()) else None
        form = _GLM if form is None and _ARGUMENT.match(source, mark.end()) else form
        return form.skip(source, mark) if form else skip_values(source, mark.end())
    skip = _SKIPS.get(mark[0].lower())
    return skip(source, mark) if skip else skip_values(source, mark.end())
