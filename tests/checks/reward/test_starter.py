"""Template files: named as requested, and never overwriting others."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from sample_rollouts import sample_rows

from toolwise.checks.reward.starter import PLACEHOLDER_NAME, create_reward_files
from toolwise.checks.reward.stored_rollouts import read_rollouts
from toolwise.errors import ConfigError
from toolwise.rewards.function import Mode


@pytest.mark.parametrize("mode", ["pointwise", "batch", "group"])
def test_the_function_bears_the_name(mode: Mode, tmp_path: Path) -> None:
    code, rollouts = create_reward_files(tmp_path, "honest", mode)
    assert (code.name, rollouts.name) == ("honest.py", "honest_rollouts.jsonl")
    text = code.read_text()
    functions = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    assert functions[0] == "honest"
    assert PLACEHOLDER_NAME not in text


def test_the_sample_has_groups_to_learn_from(tmp_path: Path) -> None:
    _, rollouts = create_reward_files(tmp_path)
    stored = read_rollouts(rollouts)
    assert len(stored) == len(sample_rows()) == 12
    assert len({one.group for one in stored}) == 3


@pytest.mark.parametrize("taken", ["mine.py", "mine_rollouts.jsonl"])
def test_nothing_is_overwritten(taken: str, tmp_path: Path) -> None:
    (tmp_path / taken).write_text("precious")
    with pytest.raises(ConfigError, match=f"{taken} already exists"):
        create_reward_files(tmp_path, "mine")
    assert (tmp_path / taken).read_text() == "precious"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("name", ["my-reward", "2nd", "class", "a/b", ""])
def test_a_name_that_python_cannot_have_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a valid function name"):
        create_reward_files(tmp_path, name)
    assert list(tmp_path.iterdir()) == []
