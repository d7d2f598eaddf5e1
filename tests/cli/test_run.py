"""`toolwise run` and `toolwise eval --budgets` from the command line, on the bundled model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from toolwise.cli import app
from toolwise.demo.tasks import write_rows
from toolwise.errors import CheckpointError, ConfigError, QuestionError
from toolwise.models import locate
from toolwise.routing.head.head import HeadSettings, RouterHead, save_head
from toolwise.training import checkpoint

SUM = "What is 4321 - 1234?"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose router prefers to calculate, created without training."""
    torch.set_num_threads(1)
    run = tmp_path_factory.mktemp("run")
    write_rows(run / "train.jsonl", 60, seed=0, split="train")
    write_rows(run / "val.jsonl", 8, seed=0, split="heldout")
    (run / "config.toml").write_text(
        f"""tools = ["calculator", "search"]
[data]
train = "{run}/train.jsonl"
val = "{run}/val.jsonl"
[rollout]
max_new_tokens = 48
[multi_turn]
max_turns = 4
[reward]
function = "toolwise.demo.reward:small_world_reward"
sandbox.tier = "off"
[router]
enable = true
wording = "silent"
eval_mode = "argmax"
"""
    )

    def fill(folder: Path) -> None:
        shutil.copytree(locate("builtin:small"), folder, dirs_exist_ok=True)
        width = int(json.loads((folder / "config.json").read_text())["hidden_size"])
        routes = ("ANSWER", "SEARCH-FAMILY", "CALCULATE-FAMILY")
        head = RouterHead(HeadSettings(width=width, routes=routes))
        with torch.no_grad():
            head.out.weight.normal_(std=0.05, generator=torch.Generator().manual_seed(0))
            head.out.bias.copy_(torch.tensor([0.0, -1.0, 1.0]))
        save_head(head, folder, {"multipliers": {}})

    checkpoint.save(run / "checkpoints", 2, {"progress": {"step": 2}}, extra_files={"model": fill})
    return run


def call(*args: object) -> Any:
    return CliRunner().invoke(app, list(map(str, args)))


def test_a_question_is_routed_and_answered_with_a_real_tool(run_folder: Path) -> None:
    result = call("run", run_folder, SUM, "--route", "calculate")
    assert result.exit_code == 0, result.output
    assert "route: CALCULATE-FAMILY" in result.stdout
    assert 'calculator({"expression": "4321 - 1234"})' in result.stdout
    assert "Answer: 3087" in result.stdout
    assert "cost 1," in result.stderr


def test_json_has_everything(run_folder: Path) -> None:
    told = json.loads(call("run", run_folder, SUM, "--route", "calculate", "--max-cost", 0, "--json").stdout)
    assert (told["route"], told["cost"]) == ("CALCULATE-FAMILY", 0.0)
    assert told["refused"] >= 1
    assert told["messages"][0]["role"] == "user"
    assert set(told["odds"]) == {"ANSWER", "SEARCH-FAMILY", "CALCULATE-FAMILY"}


def test_documents_are_searched(run_folder: Path, tmp_path: Path) -> None:
    documents = tmp_path / "facts.txt"
    documents.write_text("Selby has 321 towers.\n")
    result = call("run", run_folder, "How many towers?", "--route", "search", "--documents", documents, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["route"] == "SEARCH-FAMILY"


@pytest.mark.long
def test_a_frontier_is_shown_written_and_stored_and_then_budgets_can_be_kept(run_folder: Path) -> None:
    before = call("run", run_folder, SUM, "--budget", "0.3")
    assert isinstance(before.exception, QuestionError)
    result = call("eval", run_folder, "--budgets", "0,0.5,…,1", "--draws", "2")
    assert result.exit_code == 0, result.output
    folder = run_folder / "frontier" / "step-000002"
    told = json.loads((folder / "frontier.json").read_text())
    assert [point["budget"] for point in told["curves"]["router"]] == [0.0, 0.5, 1.0]
    sampled = {"router, sampled, not calibrated", "classifier, sampled, not calibrated"}
    assert set(told["fixed"]) >= {"always ANSWER", "ALL-TOOLS", *sampled}
    assert list(told["gap_closed"]) == ["router", "classifier", "oracle labels", "confidence", "prompted"]
    assert any(note.startswith("confidence: ") for note in told["notes"])
    assert (folder / "tuning.jsonl").read_text().count("\n") == 1 + 30 * 4  # half of the training rows
    assert (folder / "frontier.png").stat().st_size > 10_000
    pool = (folder / "pool.jsonl").read_text()
    assert pool.count("\n") == 1 + 8 * 4
    again = call("eval", run_folder, "--budgets", "0,1", "--draws", "2", "--json")
    assert again.exit_code == 0, again.output
    assert (folder / "pool.jsonl").read_text() == pool  # nothing was rolled out again
    assert json.loads(again.stdout)["rows"] == 8
    checkpoint.load(run_folder / "checkpoints" / "step-000002")
    after = call("run", run_folder, SUM, "--budget", "0")
    assert after.exit_code == 0, after.output
    assert "route: ANSWER" in after.stdout


@pytest.mark.long
def test_two_processes_make_the_same_pool_as_one(run_folder: Path) -> None:
    cells = []
    for jobs in (1, 2):
        out = run_folder / f"by-{jobs}"
        told = (
            "--draws",
            "2",
            "--no-store",
            "--out",
            out,
            "--jobs",
            jobs,
            "--json",
            "--baseline",
            f"HDPO={run_folder}",
        )
        result = call("eval", run_folder, "--budgets", "0.5", *told)
        assert result.exit_code == 0, result.output
        pools = {"pool.jsonl", "tuning.jsonl", "hdpo.jsonl"}
        cells.append({name: sorted((out / name).read_text().splitlines()) for name in pools})
        assert {path.name for path in out.iterdir()} == {*pools, "frontier.json", "frontier.png"}
    assert cells[0] == cells[1]


@pytest.mark.long
def test_other_runs_are_baselines(run_folder: Path) -> None:
    out = run_folder / "with-others"
    others = ("--otc", run_folder, "--baseline", f"HDPO={run_folder}")
    result = call(*("eval", run_folder, "--budgets", "0.5", "--draws", "2", "--no-store", *others, "--out", out))
    assert result.exit_code == 0, result.output
    told = json.loads((out / "frontier.json").read_text())
    assert {"OTC", "HDPO"} <= set(told["fixed"])
    assert {"OTC", "HDPO"} <= set(told["against_fixed"])
    assert not any("--baseline" in note for note in told["notes"])
    assert "HDPO" in result.output


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["HDPO"], "write NAME=RUN"),
        (["=runs/hdpo"], "write NAME=RUN"),
        (["A=runs/a", "A=runs/b"], "--baseline A is given twice"),
        (["A=RUN", "a=RUN"], "the name 'a' is taken"),
        (["answer=RUN"], "the name 'answer' is taken"),
        (["pool=RUN"], "the name 'pool' is taken"),
        (["../x=RUN"], "'../x' is not a name"),
    ],
)
def test_bad_baselines_are_refused_in_one_line(run_folder: Path, given: list[str], problem: str) -> None:
    options = [word for each in given for word in ("--baseline", each.replace("RUN", str(run_folder)))]
    result = call("eval", run_folder, "--budgets", "0.5", *options)
    assert isinstance(result.exception, ConfigError)
    assert problem in str(result.exception)


@pytest.mark.parametrize("budgets", ["x", "0,…"])
def test_budgets_that_make_no_sense_are_refused_before_anything_is_loaded(run_folder: Path, budgets: str) -> None:
    result = call("eval", run_folder, "--budgets", budgets)
    assert isinstance(result.exception, ConfigError)
    assert "--budgets" in str(result.exception)


def test_a_folder_that_is_nothing_is_told_in_one_line(tmp_path: Path) -> None:
    result = call("run", tmp_path, SUM)
    assert isinstance(result.exception, CheckpointError)
