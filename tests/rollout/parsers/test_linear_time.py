"""Any model output is parsed in linear time and without error: four times the text takes four times as long."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from toolwise.envs.gymnasium import extract_action
from toolwise.messages import Message
from toolwise.rewards import transcript
from toolwise.rewards.library import rlla
from toolwise.rewards.library.gsm8k import find_answer
from toolwise.rewards.library.judge import last_object
from toolwise.rollout.parsers import PARSERS
from toolwise.thinking.alternatives import mentions_action
from toolwise.thinking.reply import parse_reply

CALL = '{"name": "f", "parameters": {}}'
FAMILIES: dict[str, tuple[str, str, str]] = {
    "trailing spaces after a bare call": (CALL, " ", ""),
    "trailing lines after a bare call": (CALL, "\n", "x"),
    "trailing spaces after a call": ("<tool_call>{}", " ", ""),
    "separators": (CALL, " ;", ""),
    "separators and tags": (CALL, "; <|python_tag|> ", "x"),
    "calls": ("", CALL + " ; ", ""),
    "open tags": ("", "<tool_call>", ""),
    "open tags and spaces": ("", "<tool_call> \n", "x"),
    "open calls": ("", '<tool_call>{"name": "', ""),
    "closed tags": ("", "</tool_call>", ""),
    "open thoughts": ("", "<think>", ""),
    "thoughts": ("", "<think></think> ", ""),
    "characters that cannot be seen": ("<think></think>", "\u200b ", "<think>"),
    "open actions": ("", "<action>", ""),
    "mistral's tags": ("", "[TOOL_CALLS]", ""),
    "mistral's names": ("", "[TOOL_CALLS]f [CALL_ID] ", ""),
    "mistral's lists": ("", "[TOOL_CALLS][", ""),
    "functools": ("", 'functools[{"name": ', ""),
    "python tags": ("", "<|python_tag|>{", ""),
    "python calls": ("[f(", "a=", ""),
    "braces": ("", "{", ""),
    "braces after a tag": ("<tool_call>", "{", "</tool_call>"),
    "nested objects": ("<tool_call>", '{"a":', ""),
    "nested lists": ("<tool_call>", "[", "]"),
    "quotes": ("<tool_call>", '"', ""),
    "quotes in a string": ('<tool_call>{"name": "', '\\"', ""),
    "backslashes": ('<tool_call>{"name": "', "\\", ""),
    "an unterminated string": ('<tool_call>{"name": "', "a", ""),
    "digits": ('<tool_call>{"name": "f", "arguments": {"n": ', "1", "}}</tool_call>"),
    "digits of a bare call": ('{"name": "f", "parameters": {"n": ', "1", "}}"),
    "fences": ("", "```json\n{", ""),
    "fences and spaces": ("```", " ", "{"),
    "halves of characters": ("<tool_call>", "\ud800", "</tool_call>"),
    "spaces": ("", " ", "x"),
    "levels": ("", "<level>1</level>", ""),
    "numbers": ("#### ", "1,", ""),
    "marks": ("", "#### ", ""),
}


def message(text: str) -> Message:
    return Message(role="assistant", content=text)


TAG_SETS = [frozenset(tags) for tags in ((), ("tool_call",), ("response",), ("tool_call", "response"))]
READERS: dict[str, Callable[[str], Any]] = {
    **{name: parse for name, parse in PARSERS.items() if name not in ("qwen", "openai", "none")},
    "thinking": parse_reply,
    "named action": lambda text: mentions_action(text, text[: len(text) // 2] + "é"),
    "own action": lambda text: mentions_action(text + "a", text[len(text) // 2 :]),
    "gymnasium": extract_action,
    "blocks": transcript.top_level_blocks,
    "calls": lambda text: transcript.read_tool_calls(message(text)),
    "strict": find_answer,
    "flexible": lambda text: find_answer(text, "flexible"),
    "judge": lambda text: last_object(text, "score"),
    "rlla": lambda text: [rlla.is_well_formed(text, tags, literal=literal) for tags in TAG_SETS for literal in (0, 1)],
}


def seconds(reader: Callable[[str], Any], text: str) -> float:
    began = time.process_time()
    reader(text)
    return time.process_time() - began


def takes_twice_as_long(reader: Callable[[str], Any], head: str, unit: str, tail: str) -> bool:
    def text(length: int) -> str:
        return head + unit * (length // len(unit)) + tail

    if seconds(reader, text(24_000)) < 0.05:  # quadratic code takes seconds
        return True
    short = min(seconds(reader, text(24_000)) for _ in range(3))
    long = min(seconds(reader, text(96_000)) for _ in range(3))
    return long < 8 * short + 0.05


@pytest.mark.parametrize("name", READERS)
def test_twice_the_text_takes_twice_as_long(name: str) -> None:
    slow = [family for family, parts in FAMILIES.items() if not takes_twice_as_long(READERS[name], *parts)]
    assert slow == []


@pytest.mark.parametrize("name", READERS)
def test_nothing_raises(name: str) -> None:
    deep = '{"a":' * 20_000 + "1" + "}" * 20_000
    for text in (
        deep,
        f"<tool_call>{deep}</tool_call>",
        "[" * 100_000,
        "\ud800",
        f"[TOOL_CALLS]{deep}",
        f"[f(a={deep})]",
    ):
        READERS[name](text)
