"""Defaults that every environment inherits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from toolwise.envs.base import BaseEnv


class Bare(BaseEnv):
    async def reset(self) -> str:
        return "you are here"

    async def step(self, action: Any) -> tuple[str, float | None, bool, dict[str, Any]]:
        return f"you said {action}", 0.5, True, {}


def test_an_environment_needs_reset_and_step_and_no_more() -> None:
    with pytest.raises(TypeError):
        BaseEnv()  # type: ignore[abstract]
    env = Bare()
    assert asyncio.run(env.reset()) == "you are here"
    assert asyncio.run(env.step("hi")) == ("you said hi", 0.5, True, {})


def test_defaults_are_a_text_world_without_tools_state_or_last_rewards() -> None:
    env = Bare()
    assert env.structured_actions is False
    assert env.tool_specs() is None
    assert env.state_key is None
    assert asyncio.run(env.final_rewards()) == {}
    assert asyncio.run(env.close()) is None  # type: ignore[func-returns-value]
    env.set_seed(3)
    assert env.phase_of("anything") == "tool"
    assert env.gold_actions() is None
    assert list(env.example_actions()) == []
