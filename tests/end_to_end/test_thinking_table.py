"""The script that draws the forced-level table: what it asks, what it counts, and what it calls causal."""

from __future__ import annotations

from typing import Any

import pytest
import thinking_table as script

from toolwise.demo.rooms.house import HouseConfig
from toolwise.thinking.levels import DEFAULT_LEVELS


def table(**success: float) -> dict[str, Any]:
    found = {"easy": {1: 0.99, 2: 0.99, 3: 0.99, 4: 0.99}, "hard": {1: 0.2, 2: 0.2, 3: 0.5, 4: 0.95}}
    for name, value in success.items():
        kind, level = name.split("_")
        found[kind][int(level)] = value
    cell = {"steps": 100, "error": 0.01, "thinking_tokens": 5.0, "format_valid": 1.0}
    cells = {f"{level}/{kind}": cell | {"success": v} for kind, row in found.items() for level, v in row.items()}
    return {"houses": 25, "temperature": 1.0, "cells": cells}


def test_every_step_is_asked_with_the_right_way_before_it() -> None:
    plan = HouseConfig()
    asked = script.questions(3, plan, DEFAULT_LEVELS, 0)
    assert len(asked) == 3 * (1 + plan.halls + plan.doors + 2 * plan.locks)
    assert [q.kind for q in asked].count("hard") == 3 * plan.halls
    for question in asked:
        assert [m["role"] for m in question.history[:2]] == ["system", "user"]
        assert question.history[-1]["role"] == "user"


@pytest.mark.parametrize(
    ("change", "causal"),
    [
        ({}, True),
        ({"easy_1": 0.94}, False),
        ({"hard_1": 0.51}, False),
        ({"hard_4": 0.89}, False),
        ({"hard_3": 1.0}, True),
    ],
)
def test_thought_is_causal_where_it_decides_hard_steps_alone(change: dict[str, float], causal: bool) -> None:
    assert script.is_causal(table(**change)) is causal
    assert ("NOT" in script.show(table(**change))) is not causal


@pytest.mark.long
def test_a_model_that_was_taught_nothing_does_nothing_right() -> None:
    found = script.forced_table("builtin:small", houses=1)
    assert set(found["cells"]) == {f"{level}/{kind}" for level in "1234" for kind in ("easy", "hard")}
    assert sum(cell["steps"] for cell in found["cells"].values()) == 4 * HouseConfig().steps
    assert all(cell["success"] == 0.0 for cell in found["cells"].values())
    assert not script.is_causal(found)
