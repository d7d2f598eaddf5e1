"""Values that fit a JSON schema, to try tools and environments with."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

_MAX_DEPTH = 8


def example_value(schema: Any, random: Random | None = None, depth: int = 0) -> Any:
    """A value that fits a JSON schema (common keywords only): the simplest one, or a random one."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return "a"
    if "const" in schema:
        return schema["const"]
    if random is None and "default" in schema:
        return schema["default"]
    options = schema.get("examples") or schema.get("enum")
    if options:
        return random.choice(options) if random else options[0]
    for keyword in ("anyOf", "oneOf", "allOf"):
        if schema.get(keyword):
            return example_value(schema[keyword][0], random, depth + 1)
    kind = schema.get("type") or ("object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        required = schema.get("required") or ()
        properties = schema.get("properties") or {}
        optional = [name for name in properties if name not in required and random and random.random() < 0.5]
        return {name: example_value(properties.get(name, {}), random, depth + 1) for name in (*required, *optional)}
    if kind == "array":
        count = int(schema.get("minItems", 1))
        return [example_value(schema.get("items", {}), random, depth + 1) for _ in range(count)]
    return _scalar(kind, schema, random)


def _scalar(kind: Any, schema: Mapping[str, Any], random: Random | None) -> Any:
    if kind in ("integer", "number"):
        above = schema["exclusiveMinimum"] + 1 if "exclusiveMinimum" in schema else min(1, schema.get("maximum", 1))
        low = schema.get("minimum", above)
        return random.randint(int(low), max(int(low), int(schema.get("maximum", low + 5)))) if random else low
    if kind == "boolean":
        return random is None or random.random() < 0.5
    if kind == "null":
        return None
    text = random.choice(["a", "b", "note", "2 + 2"]) if random else "example"
    return text.ljust(int(schema.get("minLength", 0)), "a")[: int(schema.get("maxLength", 1000))]
