"""Detects the tool-call format of a model from its chat template, else from its tokenizer's added tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Detection(NamedTuple):
    name: str
    """Of a parser; "auto" if nothing tells: each text is then inspected separately."""
    why: str
    """Worded to follow "because"."""


class _Rule(NamedTuple):
    marks: tuple[str, ...]
    """All of them are in the text."""
    name: str


_RULES = (
    _Rule(("<｜DSML｜",), "deepseek_v32"),
    _Rule(("<｜tool▁call▁begin｜>", "```json"), "deepseek_v3"),
    _Rule(("<｜tool▁call▁begin｜>",), "deepseek_v31"),
    _Rule(("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    _Rule(("<|tool_call_argument_begin|>",), "kimi_k2"),
    _Rule(("<|tool_calls_section_begin|>",), "kimi_k2"),
    _Rule(("<atem:function_calls>",), "muse_glimmer"),
    _Rule(("<|channel|>", "<|message|>"), "gpt_oss"),
    _Rule(("<|START_ACTION|>",), "cohere"),
    _Rule(("<|tool_call>",), "gemma4"),
    _Rule(("<start_function_call>",), "functiongemma"),
    _Rule(("<minimax:tool_call>",), "minimax"),
    _Rule(("<seed:tool_call>",), "seed_oss"),
    _Rule(("<tool_call>", "<function="), "qwen3_coder"),
    _Rule(("<tool_call>", "<arg_key>"), "glm"),
    _Rule(("<tool_call>", "<code>"), "smollm3"),
    _Rule(("<tool_call>",), "hermes"),
    _Rule(("<|tool_call_start|>",), "lfm2"),
    _Rule(("<|tool_list_start|>",), "lfm2"),
    _Rule(("<function_calls>",), "olmo3"),
    _Rule(("<|action_start|>",), "internlm"),
    _Rule(("<TOOLCALL>",), "nemotron"),
    _Rule(("<tool_calls>",), "hunyuan"),
    _Rule(("<|/tool_call|>",), "phi4"),
    _Rule(("<|tool_call|>",), "granite"),
    _Rule(("[TOOL_CALLS]",), "mistral"),
    _Rule(("<|python_tag|>",), "llama3"),
    _Rule(("<|start_header_id|>",), "llama3"),
    _Rule(("<|header_start|>",), "llama3"),
    _Rule(("```tool_code",), "gemma3"),
    _Rule(("<action>",), "action"),
)
"""In order: first what only one format writes; last what models that were trained further keep of another's."""


def explain_parser(template: str | Mapping[str, str] | None, tokens: Iterable[str] = ()) -> Detection:
    """The parser for a chat template (or several by name), else for a tokenizer's added tokens, and the reason."""
    template_text = template if isinstance(template, str) else "\n".join((template or {}).values())
    for text, where in ((template_text, "the chat template has"), ("\n".join(tokens), "the tokenizer has the token")):
        for rule in _RULES:
            if all(mark in text for mark in rule.marks):
                return Detection(rule.name, f"{where} {' and '.join(rule.marks)}")
    return Detection("auto", "neither the chat template nor the tokenizer has a mark of a known format")


def detect_parser(template: str | Mapping[str, str] | None, tokens: Iterable[str] = ()) -> str:
    """The name that `explain_parser` gives."""
    return explain_parser(template, tokens).name
