"""`toolwise data`: published datasets become training rows, and task files are summarized."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PUBLISHED = Path(__file__).parents[1] / "fixtures"
Cli = Callable[..., Any]


@pytest.mark.parametrize(("name", "source", "rows"), [("gsm8k", "gsm8k.jsonl", 60), ("rlla", "rlla_sft.json", 400)])
def test_a_published_file_is_prepared_and_described(
    name: str, source: str, rows: int, tmp_path: Path, cli: Cli
) -> None:
    target = tmp_path / "rows.parquet"
    ended = cli("data", "prepare", name, PUBLISHED / source, "--out", target)
    assert (ended.status, ended.err) == (0, "")
    assert ended.out == f"wrote {rows} rows to {target}\n"
    told = cli("data", "stats", target, "--json")
    assert (told.status, told.err) == (0, "")
    assert json.loads(told.out)["rows"] == rows


def test_without_a_target_the_rows_go_to_a_folder_of_their_name(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli("data", "prepare", "gsm8k", PUBLISHED / "gsm8k.jsonl").status == 0
    assert (tmp_path / "data" / "gsm8k" / "gsm8k.parquet").is_file()


@pytest.mark.long
@pytest.mark.parametrize(("option", "tool"), [([], "calculator"), (["--oracle-tool"], "calc_gsm8k_reward")])
def test_prepared_rows_make_a_run(
    option: list[str], tool: str, tmp_path: Path, cli: Cli, make_config: Callable[..., Path]
) -> None:
    assert cli("data", "prepare", "gsm8k", PUBLISHED / "gsm8k.jsonl", "--out", tmp_path, *option).status == 0
    changes = {"data": {"train": "gsm8k.parquet", "val": "gsm8k.parquet", "val_limit": 3}, "tools": [tool]}
    ended = cli("train", make_config(tmp_path, changes), "--dry-run")
    assert ended.status == 0, ended.err
    assert f"3 held-out tasks, tools: {tool}" in ended.out


def test_statistics_are_shown_as_a_table(tmp_path: Path, cli: Cli, make_config: Callable[..., Path]) -> None:
    make_config(tmp_path)
    ended = cli("data", "stats", tmp_path / "train.jsonl")
    assert (ended.status, ended.err) == (0, "")
    assert "8" in ended.out
    assert "toolwise/small-world" in ended.out
