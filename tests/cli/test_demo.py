"""`toolwise demo`: a run that generates its own tasks, in a folder that can be moved, without touching user files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from toolwise.demo.recipe import BUDGET
from toolwise.routing.families import ROUTES

Cli = Callable[..., Any]
SMALL = [
    *("--set", "data.batch_size=4", "--set", "rollout.n=6", "--set", "data.val_limit=4"),
    *("--set", "rollout.temperature=1"),  # rollouts differ, so the actor learns; a run that never learns fails
    *("--set", "trainer.total_steps=1", "--set", "rollout.max_new_tokens=24", "--set", "multi_turn.max_turns=2"),
    *("--set", "router.calibration=0.2", "--set", "router.calibration_rollouts=4"),
]


@pytest.fixture(scope="module", autouse=True)
def _few_tasks() -> Iterator[None]:
    """Thousands take seconds to write and to read."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("toolwise.demo.recipe.TRAIN_TASKS", 500)
        patched.setattr("toolwise.demo.recipe.CLASSIFIER_TASKS", 60)
        yield


@pytest.fixture(scope="module")
def told() -> list[str]:
    """Output of the demo."""
    return []


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, cli: Cli, told: list[str]) -> Path:
    """A demo started from its own folder by a relative path."""
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        ended = cli("demo", "--out", "first", *SMALL)
        assert ended.status == 0, ended.err
        assert "correct before" in ended.out
        told.append(ended.out)
    return folder / "first"


@pytest.mark.long  # `make demo` runs it too
def test_the_demo_creates_a_run_folder(demo: Path) -> None:
    wanted = {"tasks", "config.toml", "metrics.jsonl", "rollouts", "checkpoints", "summary.json", "report.html"}
    assert wanted | {"frontier.json", "frontier.png"} <= {path.name for path in demo.iterdir()}
    summary = json.loads((demo / "summary.json").read_bytes())
    assert summary["name"] == "demo"
    assert (summary["before"]["n"], summary["after"]["n"]) == (4, 4)


@pytest.mark.long  # `make demo` runs it too
def test_the_router_learned_beside_the_actor(demo: Path) -> None:
    lines = [json.loads(line) for line in (demo / "metrics.jsonl").read_text().splitlines()]
    (trained,) = [line for line in lines if "router/cost/lambda" in line]
    assert trained["router/cost/budget"] == BUDGET
    assert trained["router/updates"] >= 1
    assert sum(trained[f"router/rollouts/{route}"] for route in ROUTES) == 24


@pytest.mark.long  # `make demo` runs it too
def test_the_delivered_cost_is_shown_against_the_budget(demo: Path, told: list[str]) -> None:
    assert (
        "calibration: 100 of 500 training tasks are set aside, 4 of them rolled out under every route at the end"
        in told[0]
    )
    page = (demo / "report.html").read_text(encoding="utf-8")
    for text in (told[0], page):
        assert "against a budget of 0.5" in text
        assert "calibrated at step 1: cost" in text


@pytest.mark.long  # `make demo` runs it too
def test_the_frontier_is_shown_and_what_to_try_next(demo: Path, told: list[str]) -> None:
    assert "gap closed" in told[0]
    assert "ALL-TOOLS" in told[0]
    assert 'toolwise run first "What is 417 * 38?" --budget 0.3' in told[0]
    page = (demo / "report.html").read_text(encoding="utf-8")
    assert "<h2>Routing</h2>" in page
    assert "<h2>Frontier</h2>" in page


@pytest.mark.long
def test_without_a_router_there_is_no_frontier(tmp_path: Path, cli: Cli) -> None:
    ended = cli("demo", "--out", tmp_path / "plain", *SMALL, "--set", "router.enable=false")
    assert ended.status == 0, ended.err
    assert not (tmp_path / "plain" / "frontier.json").exists()


@pytest.mark.long  # `make demo` runs it too
def test_interrupting_the_frontier_shows_how_to_continue(demo: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    async def stopped(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    def leave(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr("toolwise.demo.recipe.evaluate_small_frontier", stopped)
    monkeypatch.setattr("os._exit", leave)
    monkeypatch.chdir(demo.parent)
    ended = cli("demo", "--out", "first", "--resume", *SMALL)
    assert ended.status == 130
    assert "to evaluate it: toolwise eval first --budgets" in ended.err


@pytest.mark.long
def test_the_folder_can_be_moved_and_still_be_evaluated_and_resumed(
    demo: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = tmp_path / "moved"
    demo.rename(moved)
    try:
        monkeypatch.chdir(tmp_path)
        ended = cli("eval", "moved", "--json")
        assert ended.status == 0, ended.err
        figures, after = json.loads(ended.out), json.loads((moved / "summary.json").read_bytes())["after"]
        assert (figures["n"], set(figures["by_kind"])) == (
            after["n"],
            set(after["by_kind"]),
        )  # sampled again
        ended = cli("demo", "--out", "moved", "--resume", *SMALL, "--set", "trainer.total_steps=2")
        assert ended.status == 0, ended.err
        assert json.loads((moved / "summary.json").read_bytes())["steps"] == 2
    finally:
        moved.rename(demo)


@pytest.mark.long  # `make demo` runs it too
def test_another_seed_has_other_tasks_and_is_another_run(demo: Path, cli: Cli) -> None:
    before = (demo / "tasks" / "train.jsonl").read_bytes()
    ended = cli("demo", "--out", demo, "--resume", "--seed", 5, *SMALL)
    assert ended.status == 2
    assert "seed: 0 → 5" in ended.err
    assert (demo / "tasks" / "train.jsonl").read_bytes() == before


def test_files_of_the_user_are_read_and_never_written(
    tmp_path: Path, cli: Cli, make_config: Callable[..., Path]
) -> None:
    make_config(tmp_path)
    mine = {name: (tmp_path / name).read_bytes() for name in ("train.jsonl", "heldout.jsonl")}
    given = ["--set", f"data.train={tmp_path / 'train.jsonl'}", "--set", f"data.val={tmp_path / 'heldout.jsonl'}"]
    ended = cli("demo", "--out", tmp_path / "run", *SMALL, *given, "--set", "model.path=builtin:none")
    assert ended.status == 2
    assert "no built-in model 'none'" in ended.err
    assert {name: (tmp_path / name).read_bytes() for name in mine} == mine
