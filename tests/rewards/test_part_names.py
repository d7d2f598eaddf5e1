"""Names of reward parts: the function name, qualified if two parts share it, and never a path."""

from __future__ import annotations

from typing import Any

import pytest

from toolwise.config.loader import build_config
from toolwise.config.schema import RewardConfig, RunConfig
from toolwise.errors import ConfigError
from toolwise.rewards.combine import part_names
from toolwise.rewards.executor import episode_reward
from toolwise.rewards.function import Reward


def right(messages: Any, ground_truth: Any) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("sources", "given", "names"),
    [
        (["/home/me/my_rewards.py:score"], [], ["score"]),
        (["my_rewards.py"], [], ["my_rewards"]),
        (
            ["toolwise.rewards.library.gsm8k:gsm8k_reward", "toolwise.rewards.library.judge"],
            [],
            ["gsm8k_reward", "judge"],
        ),
        (["env", "tools", right], [], ["env", "tools", "right"]),
        ([episode_reward("env"), Reward.of(right)], [], ["env", "right"]),
        (["a/mine.py:score", "b/yours.py:score"], [], ["mine:score", "yours:score"]),
        (["a/mine.py:score", "b/mine.py:score"], [], ["mine:score", "mine:score-2"]),
        (["a/mine.py:score"] * 3, ["", "score", ""], ["mine:score", "score", "mine:score-2"]),
        (["a.py:score", "b.py:score"], ["first"], ["first", "score"]),
        (["a.py:score", "b.py:length"], ["length"], ["length", "length-2"]),
        ([], [], []),
    ],
)
def test_names(sources: list[Any], given: list[str], names: list[str]) -> None:
    assert part_names(sources, given) == names


def test_one_name_twice_is_an_error() -> None:
    with pytest.raises(ConfigError, match="two parts have the name 'a'; give each a different one"):
        part_names(["x:f", "y:g"], ["a", "a"])


def test_a_name_is_no_path() -> None:
    part = {"function": "a.py:f", "name": "some/path"}
    with pytest.raises(ConfigError, match=r"reward\.parts"):
        build_config(RunConfig, {"reward": {"parts": [part]}}, source="config")
    assert RewardConfig.model_validate({"parts": [{**part, "name": "is-right"}]}).parts[0].name == "is-right"
