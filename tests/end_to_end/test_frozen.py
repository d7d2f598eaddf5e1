"""What an earlier version wrote still loads: a configuration, a run with its checkpoint, and an export.

`data/frozen_run.tar.gz` was written at commit cfde4cf by `toolwise train run.toml --out run` and
`toolwise export run --out exported`, with a random model of 38,000 weights. It names code by that version's modules.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ARCHIVE = Path(__file__).parents[1] / "fixtures" / "frozen_run.tar.gz"
Cli = Callable[..., Any]
ONE_WORKER = ("--set", "reward.sandbox.workers=1")
"""Two rewards take turns in the sandbox: with more workers, more processes start for each turn."""
NO_SANDBOX = ("--set", "reward.sandbox.tier=off")
"""Where another command has loaded the same rewards in the sandbox."""


@pytest.fixture
def frozen(tmp_path: Path) -> Path:
    shutil.unpack_archive(ARCHIVE, tmp_path)
    for name in ("run/config.toml", "run/summary.json"):
        path = tmp_path / name
        path.write_text(path.read_text("utf-8").replace("/frozen", str(tmp_path)), encoding="utf-8")
    return tmp_path


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]


def test_a_run_of_before_gives_the_same_figures_again(frozen: Path, cli: Cli) -> None:
    ended = cli("train", frozen / "run.toml", "--out", frozen / "again", *ONE_WORKER)
    assert ended.status == 0, ended.err
    before, now = metrics(frozen / "run"), metrics(frozen / "again")
    assert [line["step"] for line in now] == [0, 1, 2, 2]
    for old, new in zip(before, now, strict=True):
        # How many steps the engine takes depends on when requests arrive.
        apart = ("time/", "canary/", "engine/steps")
        figures = {name: value for name, value in old.items() if not name.startswith(apart)}
        assert {name: new[name] for name in figures} == pytest.approx(figures, rel=1e-3, abs=1e-5, nan_ok=True)


def test_a_run_of_before_is_resumed_evaluated_and_scored(frozen: Path, cli: Cli) -> None:
    run = frozen / "run"
    evaluated = cli("eval", run, *NO_SANDBOX)
    assert evaluated.status == 0, evaluated.err
    scored = cli("score", run)
    assert scored.status == 0, scored.err
    ended = cli("resume", run, "--set", "trainer.total_steps=3", *NO_SANDBOX)
    assert ended.status == 0, ended.err
    assert [line["step"] for line in metrics(run)][-2:] == [3, 3]
    assert json.loads((run / "summary.json").read_text("utf-8"))["steps"] == 3
    assert (run / "report.html").is_file()


def test_rollouts_of_before_are_read(frozen: Path) -> None:
    from toolwise.training.records import read_records

    files = sorted((frozen / "run" / "rollouts").glob("*.jsonl"))
    assert [file.stem for file in files] == ["eval-000000", "eval-000002", "step-000001", "step-000002"]
    for file in files:
        rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        stored = [{name: record.to_json()[name] for name in row} for record, row in zip(read_records(file), rows)]  # noqa: B905
        assert stored == rows


def test_an_export_of_before_answers(frozen: Path) -> None:
    from toolwise import RoutedAgent

    agent = RoutedAgent.load(frozen / "exported", tools=["calculator", "search"], documents=["Alder has 12 mills."])
    answer = agent.ask("How many mills does Alder have?")
    assert answer.route in ("ANSWER", "CALCULATE-FAMILY", "SEARCH-FAMILY")
    assert sum(answer.route_probs.values()) == pytest.approx(1.0)
    assert answer.rollout.usage.sampled_tokens > 0
