"""Values to try tools and environments with: those that fit a JSON schema, unusual ones and invalid ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

_MAX_DEPTH = 8
ODD_TEXTS = ("", "\x00", "\ud800", "<|im_end|>\n<|im_start|>system", "'; --", "é😀" * 10, "x" * 20_000)
ODD_NUMBERS = (0, -1, 10**30)
TEXTS = ("look", "help", "0", "1", "2", "3", "wait")
"""Guesses for text environments without example actions."""
NONSENSE = ("", "no such action 42x", "   \n", "🙂 <|im_end|> </tool_call> {", "x" * 10_000)


def example_value(schema: Any, random: Random | None = None, depth: int = 0) -> Any:
    """A value that fits a JSON schema (common keywords only): the simplest one, or a random one."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return "a"
    if "const" in schema:
        return schema["const"]
    if random is None and "default" in schema:
        return schema["default"]
    if options := schema.get("examples") or schema.get("enum"):
        return random.choice(options) if random else options[0]
    for keyword in ("anyOf", "oneOf", "allOf"):
        if schema.get(keyword):
            return example_value(schema[keyword][0], random, depth + 1)
    kind = schema.get("type") or ("object" if "properties" in schema else "string")
    match kind[0] if isinstance(kind, list) else kind:
        case "object":
            required = schema.get("required") or ()
            properties = schema.get("properties") or {}
            optional = [name for name in properties if name not in required and random and random.random() < 0.5]
            return {name: example_value(properties.get(name, {}), random, depth + 1) for name in (*required, *optional)}
        case "array":
            items = schema.get("items", {})
            return [example_value(items, random, depth + 1) for _ in range(int(schema.get("minItems", 1)))]
        case "integer" | "number":
            above = schema["exclusiveMinimum"] + 1 if "exclusiveMinimum" in schema else min(1, schema.get("maximum", 1))
            low = schema.get("minimum", above)
            return random.randint(int(low), max(int(low), int(schema.get("maximum", low + 5)))) if random else low
        case "boolean":
            return random is None or random.random() < 0.5
        case "null":
            return None
        case _:
            text = random.choice(["a", "b", "note", "2 + 2"]) if random else "example"
            return text.ljust(int(schema.get("minLength", 0)), "a")[: int(schema.get("maxLength", 1000))]


def odd_arguments(parameters: dict[str, Any], plain: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """`plain` with one argument at a time replaced by an unusual value of the right type."""
    for name, schema in (parameters.get("properties") or {}).items():
        kind = schema.get("type") if isinstance(schema, dict) else None
        if kind == "string" and "enum" not in schema:
            yield from ({**plain, name: text} for text in ODD_TEXTS)
        elif kind in ("integer", "number"):
            yield from ({**plain, name: number} for number in ODD_NUMBERS)
        elif kind == "array":
            yield {**plain, name: []}


def bad_arguments(parameters: dict[str, Any], plain: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """`plain` with a missing argument, one of the wrong type, or an unknown one."""
    for name in parameters.get("required") or ():
        yield {key: value for key, value in plain.items() if key != name}
        yield {**plain, name: {"not": ["what", "was", "asked"]}}
    yield {**plain, "an_argument_that_is_not_there": 1}


def example_calls(specs: Sequence[Mapping[str, Any]], random: Random) -> list[dict[str, Any]]:
    """Two random valid calls per tool."""
    functions = [spec["function"] for spec in specs for _ in range(2)]
    schemas = [function.get("parameters") or {"type": "object"} for function in functions]
    return [
        {"name": function["name"], "arguments": example_value(schema, random)}
        for function, schema in zip(functions, schemas, strict=True)
    ]


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
