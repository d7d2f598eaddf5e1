"""Parsers for tool calls in model output: one small module per format, chosen by name from `PARSERS`.

A parser accepts any text and never raises: a call that cannot be parsed keeps its text as its arguments, so that the
model sees an error and the failure is counted. A renderer does the reverse: parse(render(content, calls)) returns the
content and the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from toolwise.messages import ToolCall
from toolwise.rollout.parsers.action import parse_action, render_action
from toolwise.rollout.parsers.auto import parse_auto
from toolwise.rollout.parsers.blocks import BlockFormat, CallTable, reasoning_of
from toolwise.rollout.parsers.detect import Detection, detect_parser, explain_parser
from toolwise.rollout.parsers.gemma import FUNCTIONGEMMA, GEMMA4
from toolwise.rollout.parsers.harmony import (
    GPT_OSS,
    MUSE_GLIMMER,
    parse_gpt_oss,
    parse_muse_glimmer,
    render_gpt_oss,
    render_muse_glimmer,
)
from toolwise.rollout.parsers.hermes import HERMES, parse_hermes, render_hermes
from toolwise.rollout.parsers.json_blocks import COHERE, HUNYUAN, INTERNLM, NEMOTRON, PHI4
from toolwise.rollout.parsers.json_calls import ParsedReply
from toolwise.rollout.parsers.llama3 import GEMMA3_BLOCKS, LLAMA3, parse_gemma3, parse_llama3, render_llama3
from toolwise.rollout.parsers.mistral import MISTRAL, parse_mistral, render_mistral
from toolwise.rollout.parsers.named_calls import DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2
from toolwise.rollout.parsers.plain_text import parse_plain_text
from toolwise.rollout.parsers.python_calls import GEMMA3, LFM2, OLMO3, SMOLLM3
from toolwise.rollout.parsers.rlla import RLLA, parse_rlla, render_rlla
from toolwise.rollout.parsers.stream import CallStream
from toolwise.rollout.parsers.xml_calls import (
    DEEPSEEK_V32,
    GLM,
    MINIMAX,
    QWEN3_CODER,
    SEED_OSS,
    Tools,
    XmlCalls,
    parameter_types,
    parse_typed,
)

__all__ = [
    "BLOCKS",
    "PARSERS",
    "RENDERERS",
    "Detection",
    "ParsedReply",
    "detect_parser",
    "explain_parser",
    "open_stream",
    "parse_action",
    "parse_auto",
    "parse_for_tools",
    "parse_hermes",
    "parse_llama3",
    "parse_mistral",
    "parse_plain_text",
    "parse_rlla",
    "reasoning_of",
    "render_action",
    "render_hermes",
    "render_llama3",
    "render_mistral",
    "render_rlla",
    "to_action",
]

Parse = Callable[[str], ParsedReply]
Render = Callable[[str, Sequence[ToolCall]], str]

_UNTYPED: dict[str, XmlCalls] = {
    "qwen3_coder": QWEN3_CODER,
    "glm": GLM,
    "minimax": MINIMAX,
    "seed_oss": SEED_OSS,
    "deepseek_v32": DEEPSEEK_V32,
}
_TABLES: dict[str, CallTable] = {
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "kimi_k2": KIMI_K2,
    "cohere": COHERE,
    "granite": PHI4,
    "phi4": PHI4,
    "hunyuan": HUNYUAN,
    "nemotron": NEMOTRON,
    "internlm": INTERNLM,
    "lfm2": LFM2,
    "olmo3": OLMO3,
    "gemma4": GEMMA4,
    "functiongemma": FUNCTIONGEMMA,
    **_UNTYPED,
}

BLOCKS: dict[str, BlockFormat] = {
    "hermes": HERMES,
    "qwen": HERMES,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "rlla": RLLA,
    "smollm3": SMOLLM3,
    "gemma3": GEMMA3_BLOCKS,
    "gpt_oss": GPT_OSS,
    "muse_glimmer": MUSE_GLIMMER,
    **{name: table.block_format() for name, table in _TABLES.items()},
}
"""The marks of each format that has any, for reading a text in pieces (stream.py)."""

PARSERS: dict[str, Parse] = {
    "auto": parse_auto,
    **{name: BLOCKS[name].parse for name in _TABLES},
    "hermes": parse_hermes,
    "qwen": parse_hermes,
    "llama3": parse_llama3,
    "mistral": parse_mistral,
    "rlla": parse_rlla,
    "smollm3": SMOLLM3.parse,
    "gemma3": parse_gemma3,
    "gpt_oss": parse_gpt_oss,
    "muse_glimmer": parse_muse_glimmer,
    "action": parse_action,
    "openai": parse_plain_text,
    "none": parse_plain_text,
}
"""The names accepted by `rollout.tool_parser`."""

RENDERERS: dict[str, Render] = {
    **{name: table.render for name, table in _TABLES.items()},
    "hermes": render_hermes,
    "qwen": render_hermes,
    "llama3": render_llama3,
    "mistral": render_mistral,
    "rlla": render_rlla,
    "smollm3": render_hermes,
    "gemma3": GEMMA3.render,
    "gpt_oss": render_gpt_oss,
    "muse_glimmer": render_muse_glimmer,
    "action": render_action,
}

_BY_PARSE = {PARSERS[name]: calls for name, calls in _UNTYPED.items()}


def parse_for_tools(parse: Parse, text: str, tools: Tools) -> ParsedReply:
    """`parse(text)`; if its format writes values without a type, the tools' schemas say which of them are strings."""
    calls = _BY_PARSE.get(parse) if tools else None
    return parse_typed(calls, text, tools) if calls else parse(text)


def open_stream(name: str, thought_open: bool | None = None, tools: Tools = None) -> CallStream:
    """Reads a reply in the format `name` piece by piece; `thought_open`: whether the prompt ends inside a thought."""
    typed = _UNTYPED[name].block_format(parameter_types(tools)) if tools and name in _UNTYPED else None
    return CallStream(PARSERS[name], typed or BLOCKS.get(name), thought_open)


def to_action(content: str, calls: list[ToolCall], reasoning: str = "") -> dict[str, Any]:
    """The action dictionary that policies pass to environments. `reasoning`: thoughts that are not in `content`."""
    reasoning_field = {"reasoning_content": reasoning} if reasoning else {}
    if not calls:
        return {"type": "text", "content": content, **reasoning_field}
    first = calls[0]
    return {
        "type": "tool_call",
        "content": content,
        "name": first.name,
        "arguments": first.arguments,
        "tool_calls": calls,
        **reasoning_field,
    }
