"""`toolwise export`: a run's model to a folder, from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

Cli = Callable[..., Any]


def test_a_run_is_exported_in_the_format_asked_for(tiny_run: Path, tmp_path: Path, cli: Cli) -> None:
    ended = cli("export", tiny_run, "--out", tmp_path / "out", "--dtype", "bfloat16")
    assert (ended.status, ended.err) == (0, "")
    assert f"{tmp_path / 'out'}: model of step 2 in bfloat16; model card: README.md" in ended.out
    assert json.loads((tmp_path / "out" / "config.json").read_bytes())["dtype"] == "bfloat16"
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.get_slice("model.norm.weight").get_dtype() == "BF16"
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "| training data | `train.jsonl` |" in card
    assert "after step 2" in card


@pytest.mark.long
def test_a_checkpoint_can_be_named_and_a_run_begin_with_it(
    tiny_run: Path, tmp_path: Path, cli: Cli, make_config: Callable[..., Path]
) -> None:
    ended = cli("export", tiny_run / "checkpoints" / "step-000001", "--out", tmp_path / "out")
    assert ended.status == 0, ended.err
    assert "model of step 1 in float32" in ended.out
    ended = cli("train", make_config(tmp_path), "--dry-run", "--set", f"model.path={tmp_path / 'out'}")
    assert ended.status == 0, ended.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--dtype", "int8"), "'int8' is not one of"),
        (("--best", "nothing"), "was validated for 'nothing'"),
    ],
)
def test_what_cannot_be_had_is_said_in_a_line(
    tiny_run: Path, tmp_path: Path, cli: Cli, words: tuple[str, str], said: str
) -> None:
    ended = cli("export", tiny_run, "--out", tmp_path / "out", *words)
    assert ended.status == 2
    assert said in " ".join(ended.err.split())
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(tiny_run: Path, cli: Cli) -> None:
    ended = cli("export", tiny_run, "--out", tiny_run)
    assert ended.status == 2
    assert ended.err == f"toolwise: {tiny_run} already exists: choose another --out, nothing is ever overwritten\n"
