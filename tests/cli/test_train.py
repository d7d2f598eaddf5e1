"""`toolwise train`: what a run leaves in its folder, and that a dry run leaves nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolwise.training.token_records import read_tokens

FILES = ["eval-000000", "eval-000002", "step-000001", "step-000002"]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_everything_is_in_the_folder(tiny_run: Path) -> None:
    assert sorted(path.name for path in tiny_run.iterdir()) == [
        "checkpoints",
        "config.toml",
        "metrics.jsonl",
        "report.html",
        "report.png",
        "rollouts",
        "summary.json",
    ]
    endings = ("jsonl", "tokens.parquet", "index.parquet")
    files = {f"{f}.{end}" for f in FILES for end in endings}
    assert {path.name for path in (tiny_run / "rollouts").iterdir()} == files | {"vocabulary.ndjson"}
    assert (tiny_run / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "tiny" in (tiny_run / "report.html").read_text(encoding="utf-8")


def test_the_configuration_in_the_folder_makes_the_same_run(tiny_run: Path) -> None:
    from toolwise.config.schema import load_config

    assert load_config(tiny_run / "config.toml") == load_config(tiny_run.parent / "run.toml")


def test_the_metrics_are_one_line_a_step_and_one_a_validation(tiny_run: Path) -> None:
    lines = read_lines(tiny_run / "metrics.jsonl")
    assert [(line["step"], "eval/score" in line) for line in lines] == [(0, True), (1, False), (2, False), (2, True)]
    for line in lines[1:3]:
        assert line["rollouts"] == 4
        assert line["time/step_s"] >= line["time/rollout_s"] > 0
    assert lines[0]["eval/n"] == lines[3]["eval/n"] == 4


@pytest.mark.parametrize(("steps", "said"), [(1, "1 step in 3 s"), (2, "2 steps in 3 s")])
def test_one_step_is_not_several(steps: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from toolwise.cli.train import report_result
    from toolwise.training.trainer import RunResult

    summary = {"before": None, "after": None, "steps": steps, "seconds": 3.2, "peak_rss_mb": 5.0}
    report_result(RunResult(tmp_path, {**summary, "interrupted": False, "updated": True}))
    assert capsys.readouterr().out.startswith(f"{said}, peak memory")


def test_the_summary_has_the_results(tiny_run: Path) -> None:
    summary = json.loads((tiny_run / "summary.json").read_bytes())
    lines = read_lines(tiny_run / "metrics.jsonl")
    for when, line in (("before", lines[0]), ("after", lines[3])):
        assert summary[when]["n"] == 4
        assert summary[when]["score"] == line["eval/score"]
        assert sum(part["n"] for part in summary[when]["by_kind"].values()) == 4
    assert (summary["steps"], summary["total_steps"], summary["interrupted"]) == (2, 2, False)
    assert summary["seconds"] > 0
    assert summary["peak_rss_mb"] > 50


@pytest.mark.parametrize("name", FILES)
def test_tokens_and_log_probs_line_up_with_the_rollouts(tiny_run: Path, name: str) -> None:
    records = read_lines(tiny_run / "rollouts" / f"{name}.jsonl")
    assert len({record["rollout_id"] for record in records}) == len(records) == 4
    rows = read_tokens(tiny_run / "rollouts" / f"{name}.tokens.parquet")
    expected = [(record["rollout_id"], i) for record in records for i in range(len(record["steps"]))]
    assert [(row.rollout_id, row.step) for row in rows] == expected
    counts = [step["tokens"] for record in records for step in record["steps"]]
    assert [len(row.token_ids) for row in rows] == [len(row.logprobs) for row in rows] == counts
    logprobs = np.concatenate([row.logprobs for row in rows])
    assert np.isfinite(logprobs).all()
    assert (logprobs <= 0).all()


def test_each_turn_s_prompt_is_all_that_came_before_it(tiny_run: Path) -> None:
    rows = read_tokens(tiny_run / "rollouts" / "step-000001.tokens.parquet")
    followed = 0
    for before, row in pairwise(rows):
        if row.step:
            assert (before.rollout_id, before.step) == (row.rollout_id, row.step - 1)
            assert before.prompt_ids is not None
            assert row.prompt_ids is not None
            seen = [*before.prompt_ids.tolist(), *before.token_ids.tolist()]
            assert row.prompt_ids[: len(seen)].tolist() == seen
            followed += 1
    assert followed


def test_the_tokens_are_what_was_said(tiny_run: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_run / "checkpoints" / "step-000002" / "model")
    records = {record["rollout_id"]: record for record in read_lines(tiny_run / "rollouts" / "eval-000002.jsonl")}
    last = {row.rollout_id: row for row in read_tokens(tiny_run / "rollouts" / "eval-000002.tokens.parquet")}
    answered = [name for name, record in records.items() if record["stop_reason"] == "answered"]
    assert answered
    for name in answered:
        said = tokenizer.decode(last[name].token_ids.tolist(), skip_special_tokens=True)
        assert said.strip() == records[name]["messages"][-1]["content"].strip()


@pytest.mark.parametrize("step", [1, 2])
def test_checkpoints_are_models_that_plain_transformers_loads(tiny_run: Path, step: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from toolwise.models import BUILTIN

    folder = tiny_run / "checkpoints" / f"step-{step:06d}" / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "What is 2 + 3?"}], return_tensors="pt")
    assert torch.isfinite(model(asked["input_ids"]).logits).all()
    first = AutoModelForCausalLM.from_pretrained(BUILTIN / "small")
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), first.parameters(), strict=True))


def test_start_up_is_shown_step_by_step(tiny_run: Path) -> None:
    lines = (tiny_run.parent / "stdout.txt").read_text(encoding="utf-8").splitlines()
    assert lines[:9] == [
        "starting the tools …",
        "starting the reward sandbox …",
        "checking the model …",
        "reading the tasks …",
        "importing PyTorch …",
        "loading the model builtin:small …",
        "building the learner …",
        "advantages: grpo sees the score of each rollout; step rewards are not used (algorithm.terminal_score = "
        '"remainder")',
        "validating on 4 held-out tasks before training …",
    ]


def test_the_results_are_shown(tiny_run: Path) -> None:
    shown = (tiny_run.parent / "stdout.txt").read_text(encoding="utf-8")
    assert "correct before" in shown
    assert "2 steps in" in shown
    assert str(tiny_run / "report.html") in shown
    assert f"run folder: {tiny_run}" in shown


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"path": "builtin:large"}}, "no built-in model"),
        ({"rollout": {"n": 1}}, "rollout.n is 1"),
        ({"data": {"val": "gone.jsonl"}}, "gone.jsonl"),
    ],
)
def test_a_dry_run_finds_what_a_run_would(
    tmp_path: Path, cli: Callable[..., Any], make_config: Callable[..., Path], changes: dict[str, Any], said: str
) -> None:
    ended = cli("train", make_config(tmp_path, changes), "--dry-run")
    assert ended.status == 2
    assert said in ended.err


def test_a_dry_run_looks_at_the_folder_too(tiny_run: Path, cli: Callable[..., Any]) -> None:
    ended = cli("train", tiny_run.parent / "run.toml", "--dry-run", "--out", tiny_run)
    assert ended.status == 2
    assert "already holds a run" in ended.err
    assert cli("train", tiny_run.parent / "run.toml", "--dry-run", "--out", tiny_run, "--resume").status == 0


@pytest.mark.long
def test_the_folder_has_a_name_of_its_own_where_none_is_given(
    tmp_path: Path, cli: Callable[..., Any], make_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    changes = {"trainer": {"total_steps": 1, "console": False}, "validation": {"before": False}}
    ended = cli("train", make_config(tmp_path, changes), "--set", "data.val_limit=1")
    assert ended.status == 0, ended.err
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("tiny-2")
    assert f"run folder: runs/{folder.name}" in ended.out
    assert json.loads((folder / "summary.json").read_bytes())["before"] is None
