"""Runs whose task files are converted do what runs with their tasks in memory do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolwise.training.records import read_records

Cli = Callable[..., Any]
MakeConfig = Callable[..., Path]


def rollouts_of(run: Path) -> dict[str, list[tuple[str, Any, float | None]]]:
    files = sorted((run / "rollouts").glob("*.jsonl"))
    return {file.name: [(r.task_id, r.messages, r.score) for r in read_records(file)] for file in files}


def test_a_run_on_converted_files_is_the_same_run(
    tmp_path: Path, tiny_run: Path, all_files_large: None, cli: Cli, make_config: MakeConfig
) -> None:
    ended = cli("train", make_config(tmp_path, {"deterministic": True}), "--out", tmp_path / "run")
    assert ended.status == 0, ended.err
    assert rollouts_of(tmp_path / "run") == rollouts_of(tiny_run)
    assert len(list((tmp_path / ".data-cache").glob("*/rows.arrow"))) == 2
    assert "cache" not in (tmp_path / "run" / "config.toml").read_text().split("[data]")[1].split("[")[0]


@pytest.mark.long
def test_a_checkpoint_of_a_run_in_memory_resumes_on_converted_files(
    tmp_path: Path, tiny_run: Path, cli: Cli, request: pytest.FixtureRequest
) -> None:
    runs = [Path(shutil.copytree(tiny_run, tmp_path / name)) for name in ("memory", "converted")]
    assert cli("resume", runs[0], "--set", "trainer.total_steps=3").status == 0
    request.getfixturevalue("all_files_large")
    ended = cli("resume", runs[1], "--set", "trainer.total_steps=3")
    assert ended.status == 0, ended.err
    assert rollouts_of(runs[0]) == rollouts_of(runs[1])
    assert (tmp_path / ".data-cache").exists()


@pytest.mark.long
def test_a_dry_run_and_an_evaluation_read_several_sources(
    tmp_path: Path, tiny_run: Path, all_files_large: None, cli: Cli, make_config: MakeConfig
) -> None:
    config = make_config(tmp_path)
    (tmp_path / "more").mkdir()
    shutil.copy(tmp_path / "train.jsonl", tmp_path / "more" / "extra.jsonl")
    sources = f'[{{path="{tmp_path}/more/*.jsonl", weight=3}}, {{path="{tmp_path}/train.jsonl", weight=1}}]'
    shown = cli("train", config, "--out", tmp_path / "run", "--dry-run", "--set", f"data.train={sources}")
    assert shown.status == 0, shown.err
    assert "16 training tasks" in shown.out
    files = f'data.val=["{tmp_path}/more/*.jsonl", "{tmp_path}/heldout.jsonl"]'
    ended = cli("eval", tiny_run, "--set", files, "--set", f"data.cache={tmp_path}/c", "--json")
    assert ended.status == 0, ended.err
    assert json.loads(ended.out)["n"] == 12


def test_a_value_that_a_tool_refuses_is_found_when_its_task_is_read(tmp_path: Path, all_files_large: None) -> None:
    from toolwise.config.schema import RunConfig
    from toolwise.data import open_tasks
    from toolwise.errors import DataError
    from toolwise.tools.catalog import build_tools
    from toolwise.training.rollout_setup import check_tasks

    def look(word: str, depth: int) -> str:
        """Look a word up.

        Args:
            word: The word.
            depth: How far.
        """
        return word * depth

    row = '{"prompt": "?", "tools_kwargs": {"look": {"create_kwargs": {"depth": %s}}}}\n'
    (tmp_path / "train.jsonl").write_text(row % "1" + row % '"deep"')
    tools = build_tools([look])
    tasks = check_tasks(RunConfig(), open_tasks(tmp_path / "train.jsonl", cache=tmp_path / "cache"), tools)
    assert tasks[0].task_id == "train/row-0"
    with pytest.raises(DataError, match=r"task train/row-1: tools_kwargs.look: .*depth.* got 'deep'"):
        tasks[1]
