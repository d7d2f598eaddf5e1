"""Tool schemas from signatures and docstrings."""

from __future__ import annotations

from typing import Any

import pytest

from toolwise.errors import ToolwiseError
from toolwise.tools.schema import build_tool_schema, make_adapter, read_annotations, returns_reward


def look(place: str, most: int = 3) -> tuple[str, float]:
    """Looks around.

    Args:
        place: Where to look.
    """
    return place, float(most)


def test_a_function_is_described_as_models_read_it() -> None:
    adapters = {key: make_adapter(kind, "look", key) for key, kind in read_annotations(look, "look").items()}
    function = build_tool_schema(look, "look", None, adapters).function
    assert function.description == "Looks around."
    assert function.parameters == {
        "type": "object",
        "properties": {
            "place": {"type": "string", "description": "Where to look."},
            "most": {"type": "integer", "default": 3},
        },
        "required": ["place"],
    }
    assert build_tool_schema(look, "look", "Another text.", adapters).function.description == "Another text."


def test_only_an_annotated_tuple_with_text_first_brings_a_reward() -> None:
    def plain() -> str:
        return ""

    def numbers() -> tuple[int, int]:
        return 1, 2

    def anything() -> Any:
        return None

    assert returns_reward(look)
    assert not any(map(returns_reward, (plain, numbers, anything)))


def test_what_cannot_be_given_by_name_or_type_is_refused() -> None:
    def untyped(x):  # type: ignore[no-untyped-def]
        return x

    def unknown(x: Nowhere) -> int:  # type: ignore[name-defined]  # noqa: F821
        return 0

    with pytest.raises(ToolwiseError, match="parameter 'x' needs a type annotation"):
        read_annotations(untyped, "untyped")
    with pytest.raises(ToolwiseError, match="cannot resolve its annotations"):
        read_annotations(unknown, "unknown")
    with pytest.raises(ToolwiseError, match="a type without a JSON schema"):
        make_adapter(type(look), "look", "x")
