"""`toolwise init`: starters that pass the command that they name, as they are written."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from selection import quick_first

Cli = Callable[..., Any]
GUIDE = Path(__file__).parents[2] / "docs" / "rewards.md"


def test_the_commands_of_the_guide_do_what_it_says(
    tmp_path: Path, tiny_run: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, sections = GUIDE.read_text(encoding="utf-8").partition("## Check it before you train")
    blocks = re.findall(r"```sh\n(.*?)```", sections, re.DOTALL)
    commands = [line.split() for block in blocks for line in block.splitlines()]
    assert [command[:2] for command in commands] == [["toolwise", name] for name in ("init", "check", "score")]
    shutil.copytree(tiny_run, tmp_path / "runs" / "first")
    monkeypatch.chdir(tmp_path)
    for command in commands:
        ended = cli(*command[1:])
        assert ended.status == 0, ended.err
    assert (tmp_path / "runs" / "first" / "rescored-my_reward.jsonl").is_file()


@pytest.mark.parametrize("mode", quick_first(["pointwise", "batch", "group"], ["group"]))
def test_what_it_writes_passes_the_check_that_it_names(
    mode: str, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = cli("init", "reward", "--mode", mode)
    assert (ended.status, ended.err) == (0, "")
    command = ended.out.splitlines()[-1].split()
    assert command == ["toolwise", "check", "reward", "my_reward.py", "--rollouts", "my_reward_rollouts.jsonl"]
    assert cli(*command[1:]).status == 0


@pytest.mark.parametrize("name", ["", "shop_world"])
@pytest.mark.parametrize("kind", ["tool", "env"])
def test_what_it_writes_passes_its_check_under_any_name(
    kind: str, name: str, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = cli("init", kind, *([name] if name else []))
    assert (ended.status, ended.err) == (0, "")
    command = shlex.split(ended.out.splitlines()[-1])
    assert command[:3] == ["toolwise", "check", kind]
    assert shlex.split((tmp_path / command[3].partition(":")[0]).read_text().splitlines()[2]) == command
    checked = cli(*command[1:])
    assert checked.status == 0, checked.out
    assert checked.out.splitlines()[-1] == "no problems found"


@pytest.mark.parametrize("name", ["", "first"])
def test_the_run_that_it_writes_passes_its_dry_run(
    name: str, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = cli("init", "config", *([name] if name else []))
    assert (ended.status, ended.err) == (0, "")
    command = shlex.split(ended.out.splitlines()[-1])
    assert command == ["toolwise", "train", f"{name or 'my_run'}.toml", "--dry-run"]
    ended = cli(*command[1:])
    assert ended.status == 0, ended.err
    assert "calculator" in ended.out


@pytest.mark.parametrize("kind", ["tool", "env", "config"])
def test_no_starter_overwrites(kind: str, tmp_path: Path, cli: Cli) -> None:
    first = cli("init", kind, "mine", "--folder", tmp_path)
    assert first.status == 0
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    ended = cli("init", kind, "mine", "--folder", tmp_path)
    assert ended.status == 2
    assert "already exists" in ended.err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_it_never_overwrites(tmp_path: Path, cli: Cli) -> None:
    assert cli("init", "reward", "mine", "--folder", tmp_path / "new").status == 0
    before = (tmp_path / "new" / "mine.py").read_bytes()
    ended = cli("init", "reward", "mine", "--folder", tmp_path / "new", "--mode", "group")
    assert ended.status == 2
    assert "mine.py already exists" in ended.err
    assert (tmp_path / "new" / "mine.py").read_bytes() == before


def test_a_bad_name_is_one_line(tmp_path: Path, cli: Cli) -> None:
    ended = cli("init", "reward", "my-reward", "--folder", tmp_path)
    assert (ended.status, len(ended.err.splitlines())) == (2, 1)
    assert "is not a valid function name" in ended.err
