"""Test actions for an environment whose author gives none: calls that fit its schemas, and invalid calls and texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

TEXTS = ("look", "help", "0", "1", "2", "3", "wait")
"""Guesses for text environments without example actions."""
NONSENSE = ("", "no such action 42x", "   \n", "🙂 <|im_end|> </tool_call> {", "x" * 10_000)
_DEPTH = 5


def example_calls(specs: Sequence[Mapping[str, Any]], random: Random) -> list[dict[str, Any]]:
    """Two random valid calls per tool."""
    calls = []
    for spec in specs:
        function = spec["function"]
        for _ in range(2):
            arguments = example_of(function.get("parameters") or {"type": "object"}, random)
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


def example_of(schema: Any, random: Random, depth: int = 0) -> Any:
    """A random value that fits a JSON schema; covers the common keywords only."""
    if not isinstance(schema, Mapping) or depth > _DEPTH:
        return "a"
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return random.choice(list(schema["enum"]))
    for keyword in ("anyOf", "oneOf", "allOf"):
        if schema.get(keyword):
            return example_of(schema[keyword][0], random, depth + 1)
    if schema.get("examples"):
        return random.choice(list(schema["examples"]))
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        required = schema.get("required", ())
        properties = schema.get("properties", {}).items()
        return {k: example_of(v, random, depth + 1) for k, v in properties if k in required or random.random() < 0.5}
    if kind == "array":
        count = max(1, int(schema.get("minItems", 1)))
        return [example_of(schema.get("items", {}), random, depth + 1) for _ in range(count)]
    return _single(kind, schema, random)


def _single(kind: Any, schema: Mapping[str, Any], random: Random) -> Any:
    if kind in ("integer", "number"):
        low = schema.get("minimum", schema.get("exclusiveMinimum", 0) + (1 if "exclusiveMinimum" in schema else 0))
        high = schema.get("maximum", low + 5)
        return random.randint(int(low), max(int(low), int(high)))
    if kind == "boolean":
        return random.random() < 0.5
    if kind == "null":
        return None
    text = random.choice(["a", "b", "note", "2 + 2"])
    return text.ljust(int(schema.get("minLength", 0)), "a")[: int(schema.get("maxLength", 1000))]
