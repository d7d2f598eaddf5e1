"""What docs/environments.md shows is true."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from toolwise.envs.base import BaseEnv
from toolwise.envs.catalog import ENVS, INTERACTIONS, build_env_factory
from toolwise.envs.conformance.check import check_env
from toolwise.envs.conformance.exam import Exam
from toolwise.envs.gymnasium import GymnasiumEnv
from toolwise.envs.methods import CONVENTIONS
from toolwise.types import Task

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
BLOCKS: list[str] = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
TASK = Task(task_id="t", prompt=[])


def block(word: str) -> str:
    return next(text for text in BLOCKS if word in text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_worlds.py").write_text(block("class GuessNumber"))
    (tmp_path / "shelf.py").write_text(block("class Shelf"))
    return tmp_path


def test_the_smallest_environment_passes_the_check(folder: Path) -> None:
    factory = build_env_factory(f"{folder / 'my_worlds.py'}:GuessNumber")
    check = check_env(lambda: factory(TASK), actions=[str(number) for number in range(0, 101, 5)])
    assert check.ok, [f for f in check.findings if f.verdict == "wrong"]


def test_the_plain_class_passes_the_check(folder: Path) -> None:
    factory = build_env_factory(f"{folder / 'shelf.py'}:Shelf", {"kwargs": {"books": ["Ulysses"]}})
    check = check_env(lambda: factory(TASK), gold=[{"name": "add", "arguments": {"title": "Emma"}}])
    assert check.ok, [f for f in check.findings if f.verdict == "wrong"]


def test_the_gymnasium_example_makes_one() -> None:
    made = eval(block("FrozenLake"), {"build_env_factory": build_env_factory})(
        TASK
    )  # the page's own, and no one else's
    assert isinstance(made, GymnasiumEnv)


def test_every_name_is_told() -> None:
    methods = [name for name in vars(BaseEnv) if not name.startswith("_") and name != "structured_actions"]
    options = [name for name in inspect.signature(GymnasiumEnv).parameters if name != "world"]
    findings = [*Exam(BaseEnv, [], None, None, 0, 1, 1.0).names(), "event loop"]
    untold = [name for name in (*methods, *options, *CONVENTIONS, *ENVS, *INTERACTIONS) if f"`{name}" not in PAGE]
    assert untold == []
    assert [name for name in findings if f"| {name} |" not in PAGE] == []
