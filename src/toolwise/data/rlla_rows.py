"""Parses RLLA (ToolRL) rows: the tools in the system message, and the kind and calls of the gold answer."""

from __future__ import annotations

import json
import re
from typing import Any, Literal, NamedTuple

from toolwise.errors import DataError

TOOL_ENTRY = re.compile(r"^\d+\. Name: (.*)\nDescription: (.*)\nParameters: (.*)$", re.MULTILINE)
_TOOL_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)

GoldKind = Literal["tool-only", "response-only", "both", "neither"]


class ToolEntry(NamedTuple):
    """One entry of the `**Available Tools**` block."""

    name: str
    description: str
    parameters: dict[str, Any]
    """Maps parameter names to {description, type, default}: RLLA's form, not a JSON schema."""


def parse_tools(system_text: str) -> list[ToolEntry]:
    """The tools described in a system message, in order; possibly none."""
    entries = []
    for name, description, text in TOOL_ENTRY.findall(system_text):
        try:
            parameters = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"tool {name!r}: its Parameters line is not JSON ({error}); write one JSON object"
            ) from error
        if not isinstance(parameters, dict):
            raise DataError(f"tool {name!r}: its Parameters line is not a JSON object; write one object, {{}} for none")
        entries.append(ToolEntry(name.strip(), description.strip(), parameters))
    return entries


def after_thought(text: str) -> str:
    """`text` after its leading thought. A thought may mention a tag without using it, so tags count only after it."""
    if text.lstrip().startswith("<think>") and "</think>" in text:
        return text.split("</think>", 1)[1]
    return text


def gold_kind(ground_truth: str) -> GoldKind:
    """Whether the gold answer calls tools, responds, does both or neither."""
    text = after_thought(ground_truth)
    calls, responds = "<tool_call>" in text, "<response>" in text
    if calls:
        return "both" if responds else "tool-only"
    return "response-only" if responds else "neither"


def gold_calls(ground_truth: str) -> list[dict[str, Any]]:
    """The calls of the gold answer: one JSON object per line in its last tool_call block."""
    blocks = _TOOL_BLOCK.findall(after_thought(ground_truth))
    calls = []
    for line in blocks[-1].split("\n") if blocks else []:
        if not line.strip():
            continue
        try:
            call = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"gold call {line.strip()[:80]!r} is not JSON ({error}); one call per line") from error
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise DataError(f'gold call {line.strip()[:80]!r} has no name; write {{"name": …, "parameters": …}}')
        calls.append(call)
    return calls
