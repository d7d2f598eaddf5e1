"""References to modules of earlier versions resolve to the current modules."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from toolwise.config.imports import load_reference
from toolwise.config.moved_modules import MOVED, current_module
from toolwise.config.schema import RewardConfig, SandboxConfig
from toolwise.sandbox.targets import resolve
from toolwise.training.evaluate import build_scoring


def test_every_module_moved_and_its_new_place_exists() -> None:
    for old, new in MOVED.items():
        assert importlib.util.find_spec(f"toolwise.{new}") is not None, old
        assert current_module(f"toolwise.{old}") == f"toolwise.{new}", old
        assert new not in MOVED, old


def test_modules_of_a_moved_package_move_with_it() -> None:
    assert current_module("toolwise.tools.search.tool") == "toolwise.tools.builtin.search.tool"
    assert current_module("toolwise.checkpoint.files") == "toolwise.serialization.files"
    assert current_module("toolwise.checkpoint.loader") == "toolwise.training.checkpoint.loader"


@pytest.mark.parametrize("name", ["toolwise", "toolwise.tools.base", "tools.calculator", "mine.rewards.rlla", "", "."])
def test_other_names_stay(name: str) -> None:
    assert current_module(name) == name


def test_an_old_reference_gives_the_present_object() -> None:
    from toolwise.tools.builtin.calculator import CalculatorTool

    found: Any = load_reference("toolwise.tools.calculator:CalculatorTool", what="tools")
    assert found is CalculatorTool


def test_a_worker_is_told_the_present_name() -> None:
    assert resolve("toolwise.rewards.gsm8k:gsm8k_reward").reference == "toolwise.rewards.library.gsm8k:gsm8k_reward"


def test_a_reward_trusted_under_its_old_name_runs_in_this_process() -> None:
    sandbox = SandboxConfig(trusted=["toolwise.rewards.shaping"])
    scoring = build_scoring(RewardConfig(function="toolwise.rewards.library.shaping:length_reward", sandbox=sandbox))
    try:
        (part,) = scoring.rewards.parts
        assert part.reward.function is not None
    finally:
        scoring.close()
