"""The lifecycle of a run: signals, interruption, resumption, and cleanup after a killed run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from toolwise.config.schema import RunConfig
from toolwise.errors import CheckpointError, ConfigError
from toolwise.training.changes import portable_config
from toolwise.training.run_folder import check_folder, delete_rollouts_after, open_run, remove_partial_files

Cli = Callable[..., Any]
MakeConfig = Callable[..., Path]

JUDGE = """
import os, signal
from toolwise.demo.reward import small_world_reward

left = os.environ.get("SIGNALS", "").split()

def judge(messages, ground_truth, step=0):
    while left and step == int(os.environ["AT_STEP"]):
        signal.raise_signal(signal.Signals[left.pop(0)])
    return small_world_reward(messages, ground_truth)
"""
"""A reward that sends its own process signals, so that they come at a certain moment and at no other."""


def make_signalled(folder: Path, make_config: MakeConfig, **trainer: Any) -> Path:
    (folder / "judge.py").write_text(JUDGE, encoding="utf-8")
    here = {"function": "judge.py:judge", "sandbox": {"tier": "off"}}  # a worker could not signal this process
    return make_config(folder, {"reward": here, "trainer": trainer})


def summary_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_bytes())
    return found


def steps_of(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def checkpoints_of(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.fixture
def no_deadly_sigterm() -> Iterator[None]:
    """Should a run not catch SIGTERM, a test is to fail and not to end all of them."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("no_deadly_sigterm")
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(
    tmp_path: Path, cli: Cli, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM here; tests/end_to_end/test_determinism.py has a run that is stopped by Ctrl-C."""
    monkeypatch.setenv("SIGNALS", "SIGTERM")
    monkeypatch.setenv("AT_STEP", "1")
    config, run = make_signalled(tmp_path, make_config, total_steps=6, save_every=5), tmp_path / "run"
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    ended = cli("train", config, "--out", run)
    assert ended.status == 130
    assert "SIGTERM: finishing this step and saving; repeat to stop immediately" in ended.err
    assert f"stopped after step 2; resume with: toolwise resume {run}" in ended.out
    assert "Traceback" not in ended.err
    assert checkpoints_of(run) == ["step-000000", "step-000002"]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    found = summary_of(run)
    assert (found["interrupted"], found["steps"], found["after"]) == (True, 2, None)
    assert found["before"]["n"] == 4
    ended = cli("resume", run, "--set", "trainer.total_steps=3")
    assert ended.status == 0, ended.err
    assert steps_of(run) == [0, 1, 2, 3, 3]
    assert summary_of(run)["interrupted"] is False


@pytest.mark.long
@pytest.mark.usefixtures("no_deadly_sigterm")
def test_a_validation_of_an_earlier_step_is_not_the_final_one(
    tmp_path: Path, cli: Cli, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIGNALS", "SIGTERM")
    monkeypatch.setenv("AT_STEP", "2")
    config, run = make_signalled(tmp_path, make_config, total_steps=6), tmp_path / "run"
    more = [word for key in ("validation.every=1", "validation.before=false") for word in ("--set", key)]
    assert cli("train", config, "--out", run, *more, "--set", "trainer.total_steps=1").status == 0
    first = summary_of(run)
    assert first["last_validation"] == {"step": 1, **first["after"]}
    progress = next((run / "checkpoints" / "step-000001").glob("progress*.json"))
    assert json.loads(progress.read_text(encoding="utf-8"))["last_step"] == 1
    ended = cli("resume", run, "--set", "trainer.total_steps=6", "--set", "validation.every=5")
    assert ended.status == 130, ended.err
    found = summary_of(run)
    assert (found["interrupted"], found["steps"], found["after"]) == (True, 3, None)
    assert found["last_validation"] == first["last_validation"]
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "not finished" in page
    assert "at step 1" in page


@pytest.mark.long
def test_a_second_signal_ends_it_at_once(tmp_path: Path, make_config: MakeConfig) -> None:
    config, run = make_signalled(tmp_path, make_config, total_steps=6, save_every=1), tmp_path / "run"
    told = {"SIGNALS": "SIGINT SIGINT", "AT_STEP": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "toolwise", "train", str(config), "--out", str(run)]
    ended = subprocess.run(command, env={**os.environ, **told}, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 130
    assert "repeat to stop immediately" in ended.stderr
    assert f"stopped immediately; resume from the last checkpoint with: toolwise resume {run}" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert steps_of(run) == [0, 1]
    assert not (run / "summary.json").exists()
    assert checkpoints_of(run)[-1] == "step-000001"


def test_a_signal_in_the_last_step_interrupts_nothing(
    tmp_path: Path, cli: Cli, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIGNALS", "SIGINT")
    monkeypatch.setenv("AT_STEP", "0")
    config = make_signalled(tmp_path, make_config, total_steps=1)
    ended = cli("train", config, "--out", tmp_path / "run", "--set", "validation.before=false")
    assert ended.status == 0
    assert "stopped" not in ended.out
    assert summary_of(tmp_path / "run")["interrupted"] is False


@pytest.mark.long
def test_a_finished_run_is_only_summed_up_again(tiny_run: Path, tmp_path: Path, cli: Cli) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    (run / "summary.json").unlink()
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.suffix in (".jsonl", ".safetensors")}
    ended = cli("train", tiny_run.parent / "run.toml", "--out", run, "--resume")
    assert ended.status == 0, ended.err
    assert {path: path.read_bytes() for path in before} == before
    assert summary_of(run)["after"] == summary_of(tiny_run)["after"]
    assert summary_of(run)["seconds"] >= 0


def test_a_checkpoint_that_did_not_keep_the_step_of_its_validation_is_summed_up_too(
    tiny_run: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    from toolwise.training.run import Progress

    load = Progress.load_state_dict
    monkeypatch.setattr(
        Progress,
        "load_state_dict",
        lambda self, state: load(self, {k: v for k, v in state.items() if k != "last_step"}),
    )
    run = Path(shutil.copytree(tiny_run, tmp_path / "run"))
    (run / "summary.json").unlink()
    ended = cli("resume", run)
    assert ended.status == 0, ended.err
    assert summary_of(run)["after"] == summary_of(tiny_run)["after"]
    assert summary_of(run)["last_validation"]["step"] == 2


@pytest.mark.long
def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning(tiny_run: Path, tmp_path: Path, cli: Cli) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    (run / "checkpoints" / "step-000002" / "actor.json").write_text("{}", encoding="utf-8")
    ended = cli("train", tiny_run.parent / "run.toml", "--out", run, "--resume")
    assert ended.status == 0
    assert "passed over" in ended.err
    assert "step-000002" in ended.err
    assert steps_of(run) == [0, 1, 2, 2]


@pytest.mark.parametrize("left", [pytest.param("no configuration", marks=pytest.mark.long), "no checkpoint"])
def test_a_run_killed_before_its_first_checkpoint_starts_over(
    left: str, tmp_path: Path, cli: Cli, make_config: MakeConfig
) -> None:
    config, run = make_config(tmp_path, {"trainer": {"total_steps": 1}}), tmp_path / "run"
    (run / "rollouts").mkdir(parents=True)
    (run / ".config.toml.1.tmp").write_text("name = ", encoding="utf-8")
    if left == "no checkpoint":
        from toolwise.config.loader import to_toml
        from toolwise.config.schema import load_config

        (run / "config.toml").write_text(to_toml(load_config(config)), encoding="utf-8")
        (run / "metrics.jsonl").write_text('{"step": 0, "eval/score": 0.5}\n{"step": 1, "sc', encoding="utf-8")
        (run / "rollouts" / "eval-000000.jsonl").write_text("{}\n", encoding="utf-8")
        (run / "rollouts" / ".step-000001.jsonl.1.tmp").write_text("{", encoding="utf-8")
        (run / "checkpoints" / "step-000000.tmp-1" / "model").mkdir(parents=True)
    ended = cli("train", config, "--out", run, *(["--resume"] if left == "no checkpoint" else []))
    assert ended.status == 0, ended.err
    assert steps_of(run) == [0, 1, 1]
    assert len((run / "rollouts" / "eval-000000.jsonl").read_text(encoding="utf-8").splitlines()) == 4
    assert [path for path in run.rglob("*") if "tmp" in path.name] == []


def test_only_what_a_killed_run_was_writing_is_swept_up(tmp_path: Path) -> None:
    ours = [
        ".config.toml.12.tmp",
        ".summary.json.7.tmp",
        "metrics.jsonl.tmp",
        "report.html.tmp",
        "report.png.tmp",
        "rollouts/.eval-000000.safetensors.3.tmp",
        "checkpoints/step-000004.tmp-99/model/config.json",
        "checkpoints/step-000002.tmp-99-0123abcd/manifest.json",
    ]
    theirs = ["notes.tmp", "rollouts/mine.txt", "checkpoints/step-000002/manifest.json", "metrics.jsonl", "tasks/a.tmp"]
    for name in (*ours, *theirs):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    remove_partial_files(tmp_path)
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert left == set(theirs)


def test_only_rollouts_after_the_checkpoint_are_forgotten(tmp_path: Path) -> None:
    for name in ("step-000001.jsonl", "step-000002.safetensors", "eval-000003.jsonl", "step-1000000.jsonl", "mine.txt"):
        (tmp_path / name).touch()
    delete_rollouts_after(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"step-000001.jsonl", "step-000002.safetensors", "mine.txt"}
    delete_rollouts_after(tmp_path / "nowhere", 2)


def test_a_folder_is_looked_at_and_not_touched(tmp_path: Path) -> None:
    config = RunConfig()
    check_folder(tmp_path / "new", config, resume=False)
    for folder in (tmp_path / "new", tmp_path):
        with pytest.raises(ConfigError, match="holds no run to resume"):
            check_folder(folder, config, resume=True)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "config.toml").write_text("seed = 1\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="already holds a run"):
        check_folder(tmp_path, config, resume=False)
    with pytest.raises(ConfigError, match="seed: 1 → 0"):
        check_folder(tmp_path, config, resume=True)
    (tmp_path / "config.toml").write_text("seed = x\n", encoding="utf-8")
    with pytest.raises(CheckpointError, match="not valid TOML"):
        check_folder(tmp_path, config, resume=True)


@pytest.mark.parametrize("may", ["trainer.total_steps=7", "trainer.save_every=2", "validation.every=3", "name=other"])
def test_some_settings_may_change_on_the_way(may: str, tiny_run: Path) -> None:
    from toolwise.config.schema import load_config

    check_folder(tiny_run, load_config(tiny_run.parent / "run.toml", [may]), resume=True)


def test_the_same_file_by_another_way_is_the_same_run(
    tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from toolwise.config.schema import load_config

    (tmp_path / "link").symlink_to(tiny_run.parent)
    monkeypatch.chdir(tiny_run.parent)
    for path in (tmp_path / "link" / "train.jsonl", Path("train.jsonl"), Path("run/../train.jsonl")):
        check_folder(tiny_run, load_config("run.toml", [f"data.train={path}"]), resume=True)


def test_what_lies_in_the_folder_is_written_relative_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"train": "run/tasks/train.jsonl", "val": "val.jsonl"}
    data = portable_config(RunConfig.model_validate({"data": given}), Path("run")).data
    assert (data.train, data.val) == (Path("tasks/train.jsonl"), tmp_path / "val.jsonl")
    assert portable_config(RunConfig(), Path("run")) == RunConfig()


@pytest.mark.long
def test_an_edited_reward_is_reported_and_used_when_the_run_is_resumed(
    tmp_path: Path, cli: Cli, make_config: MakeConfig
) -> None:
    reward, run = tmp_path / "rw.py", tmp_path / "run"
    reward.write_text("def score(messages, ground_truth):\n    return (1.0 + len(str(messages)) % 7)\n")
    changes = {"reward": {"function": "rw.py:score"}, "trainer": {"total_steps": 1}}
    assert cli("train", make_config(tmp_path, changes), "--out", run).status == 0
    ended = cli("resume", run, "--set", "trainer.total_steps=2")
    assert "source of the reward" not in ended.err
    reward.write_text(reward.read_text().replace("return ", "return -"))
    ended = cli("resume", run, "--set", "trainer.total_steps=3")
    assert (
        "resumed at step 2 with changed settings: trainer.total_steps: 2 → 3, source of the reward score: " in ended.err
    )
    assert [change["step"] for change in summary_of(run)["changes"] if "reward" in change["key"]] == [2]
    assert summary_of(run)["before"]["score"] > 0 > summary_of(run)["after"]["score"]


@pytest.mark.long
def test_another_best_metric_is_not_compared_with_the_old_one(tiny_run: Path, tmp_path: Path, cli: Cli) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    figures = figures_of(run)
    assert len(figures) == 2
    ended = cli("resume", run, "--set", "trainer.total_steps=3", "--set", "trainer.best_metric=-tokens")
    assert ended.status == 0, ended.err
    figures |= figures_of(run)
    assert best_of(run) == max(-found["tokens"] for found in figures.values())
    ended = cli("resume", run, "--set", "trainer.total_steps=4", "--set", "trainer.best_metric=score")
    assert ended.status == 0, ended.err
    kept = figures | figures_of(run)
    assert best_of(run) in {found["score"] for found in kept.values()}


@pytest.mark.long
def test_a_metric_that_no_validation_has_leaves_no_best(tiny_run: Path, tmp_path: Path, cli: Cli) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    ended = cli("resume", run, "--set", "trainer.total_steps=3", "--set", "trainer.best_metric=no_such")
    assert ended.status == 0, ended.err
    assert best_of(run) is None


def figures_of(run: Path) -> dict[str, dict[str, float]]:
    """checkpoint -> figures of its validation"""
    found = {
        name: json.loads((run / "checkpoints" / name / "manifest.json").read_bytes()) for name in checkpoints_of(run)
    }
    return {name: manifest["figures"] for name, manifest in found.items() if manifest["figures"]}


def best_of(run: Path) -> float | None:
    """By the latest checkpoint."""
    best: float | None = json.loads((run / "checkpoints" / checkpoints_of(run)[-1] / "progress.json").read_bytes())[
        "best"
    ]
    return best


def test_early_stopping_ends_the_run_and_a_resumed_one_counts_on(
    tmp_path: Path, cli: Cli, make_config: MakeConfig
) -> None:
    """Every validation has the same score: none is better than the one before training."""
    (tmp_path / "same.py").write_text("def same(messages, ground_truth):\n    return 0.5\n", encoding="utf-8")
    settings = {
        "reward": {"function": "same.py:same", "sandbox": {"tier": "off"}},
        "trainer": {"total_steps": 9, "early_stopping": 1, "save_every": 9},
        "validation": {"every": 1},
    }
    run = tmp_path / "run"
    ended = cli("train", make_config(tmp_path, settings), "--out", run)
    why = "the last validation is not better than an earlier one (score); a higher trainer.early_stopping goes on"
    assert f"ended after step 1 of 9: {why}" in ended.out, ended.err
    found = summary_of(run)
    assert (found["steps"], found["stopped"], found["stopped_early"], found["interrupted"]) == (1, why, True, False)
    assert found["after"] is not None
    assert open_run(run).finished
    again = cli("resume", run)
    assert "ended after step 1 of 9" in again.out, again.err
    more = cli("resume", run, "--set", "trainer.early_stopping=2")
    assert "ended after step 2 of 9: the last 2 validations are not better" in more.out, more.err
    assert steps_of(run).count(2) == 2  # of the step and of its validation
