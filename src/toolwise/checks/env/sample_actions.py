"""Test actions for an environment whose author gives none: calls that fit its schemas, and invalid calls and texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from toolwise.checks.example_values import example_value

TEXTS = ("look", "help", "0", "1", "2", "3", "wait")
"""Guesses for text environments without example actions."""
NONSENSE = ("", "no such action 42x", "   \n", "🙂 <|im_end|> </tool_call> {", "x" * 10_000)


def example_calls(specs: Sequence[Mapping[str, Any]], random: Random) -> list[dict[str, Any]]:
    """Two random valid calls per tool."""
    calls = []
    for spec in specs:
        function = spec["function"]
        for _ in range(2):
            arguments = example_value(function.get("parameters") or {"type": "object"}, random)
            calls.append({"name": function["name"], "arguments": arguments})
    return calls


def nonsense_calls(specs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Invalid calls: unknown name, broken JSON, wrong arguments."""
    name = specs[0]["function"]["name"] if specs else "anything"
    return [
        {"name": "no_such_tool", "arguments": {}},
        {"name": "__class__", "arguments": {}},
        {"name": "", "arguments": "{broken"},
        {"name": name, "arguments": "{broken"},
        {"name": name, "arguments": {"no_such_argument": [1, {"a": None}]}},
    ]
