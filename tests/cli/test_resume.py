"""`toolwise resume RUN`: the run's own settings, and settings that may change on resume."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolwise.config.schema import load_config

Cli = Callable[..., Any]
MakeConfig = Callable[..., Path]


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def files_of(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, cli: Cli, make_config: MakeConfig) -> Path:
    """A run of two steps with settings that its configuration file does not have. Tests must copy it."""
    folder = tmp_path_factory.mktemp("resume")
    # so that every step has something to learn from
    config = make_config(
        folder, {"actor": {"lr": 1e-4, "entropy_coef": 0.01}, "algorithm": {"zero_std_groups": "keep"}}
    )
    ended = cli("train", config, "--out", folder / "run", "--set", "rollout.max_new_tokens=24", "--set", "seed=5")
    assert ended.status == 0, ended.err
    return folder / "run"


@pytest.fixture
def run(begun: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(begun, tmp_path / "run"))


def test_a_run_goes_on_with_what_was_set_when_it_began_wherever_its_folder_is(
    run: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = run.rename(tmp_path / "moved to")
    monkeypatch.chdir(tmp_path)
    ended = cli("resume", "moved to", "--set", "trainer.total_steps=3")
    assert ended.status == 0, ended.err
    assert "run folder: moved to" in ended.out
    assert [line["step"] for line in lines_of(moved / "metrics.jsonl")] == [0, 1, 2, 2, 3, 3]
    config = load_config(moved / "config.toml")
    assert (config.rollout.max_new_tokens, config.seed, config.trainer.total_steps) == (24, 5, 3)


def test_a_finished_run_stays_as_it_is(run: Path, cli: Cli) -> None:
    before = files_of(run)
    ended = cli("resume", run)
    assert (ended.status, ended.out, ended.err) == (0, "nothing left to do: the run is at step 2 of 2\n", "")
    assert files_of(run) == before


@pytest.mark.parametrize("summed_up", [True, False])
def test_fewer_steps_than_the_run_has_leave_nothing_to_do(summed_up: bool, run: Path, cli: Cli) -> None:
    if not summed_up:  # as if it had been killed
        (run / "summary.json").unlink()
    before = files_of(run)
    ended = cli("resume", run, "--set", "trainer.total_steps=1")
    assert (ended.status, ended.out, ended.err) == (0, "nothing left to do: the run is at step 2 of 1\n", "")
    assert files_of(run) == before


def test_in_python_a_finished_run_gives_its_summary_again(run: Path) -> None:
    from toolwise import resume

    result = resume(run)
    assert result.note == "nothing left to do: the run is at step 2 of 2"
    assert result.summary == json.loads((run / "summary.json").read_bytes())


def test_the_configuration_file_alone_is_another_run_and_the_way_out_is_named(begun: Path, cli: Cli) -> None:
    ended = cli("train", begun.parent / "run.toml", "--out", begun, "--resume")
    assert ended.status == 2
    assert "seed: 5 → 0, rollout.max_new_tokens: 24 → 32" in ended.err
    assert f"toolwise resume {begun}" in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.long
def test_rate_schedule_batch_and_deadlines_may_change_and_it_is_recorded(run: Path, cli: Cli) -> None:
    new = {
        "actor.lr": 5e-4,
        "actor.lr_schedule": '"linear"',
        "actor.schedule_steps": 6,
        "actor.micro_batch_tokens": 512,
        "data.batch_size": 1,
        "multi_turn.tool_timeout_s": 7.5,
        "trainer.total_steps": 4,
    }
    ended = cli("resume", run, *(word for key, value in new.items() for word in ("--set", f"{key}={value}")))
    assert ended.status == 0, ended.err
    assert "resumed at step 2 with changed settings:" in ended.err
    assert "actor.lr: 0.0001 → 0.0005" in ended.err
    recorded = {line["key"]: (line["step"], line["old"], line["new"]) for line in lines_of(run / "changes.jsonl")}
    assert recorded["actor.lr"] == (2, 1e-4, 5e-4)
    assert recorded["data.batch_size"] == (2, 2, 1)
    assert recorded.keys() == new.keys()
    steps = [line for line in lines_of(run / "metrics.jsonl") if "actor/lr" in line]
    assert [line["actor/lr"] for line in steps] == pytest.approx([1e-4, 1e-4, 5e-4 * 3 / 6, 5e-4 * 2 / 6])
    assert [line["rollouts"] for line in steps] == [4, 4, 2, 2]
    seen = [{row["task_id"] for row in lines_of(run / "rollouts" / f"step-{step:06d}.jsonl")} for step in (1, 2, 3, 4)]
    assert [len(tasks) for tasks in seen] == [2, 2, 1, 1]
    assert len(set.union(*seen)) == 6  # of the epoch's 8, without repeats
    summary = json.loads((run / "summary.json").read_bytes())
    assert {change["key"] for change in summary["changes"]} == new.keys()
    assert "step 2: actor.lr: 0.0001 → 0.0005" in (run / "report.html").read_text(encoding="utf-8")


@pytest.mark.long
def test_a_change_that_died_before_its_checkpoint_is_not_recorded_twice(run: Path, cli: Cli) -> None:
    """A change made by hand in the run folder's config.toml is kept, too."""
    for more in (["--set", "trainer.save_every=7", "--set", "trainer.total_steps=3"], []):
        file = run / "config.toml"
        file.write_text(file.read_text(encoding="utf-8").replace("lr = 0.0001", "lr = 0.0003", 1), encoding="utf-8")
        ended = cli("resume", run, *more)
        assert ended.status == 0, ended.err
        assert "actor.lr: 0.0001 → 0.0003, trainer.total_steps: 2 → 3, trainer.save_every: 1 → 7" in ended.err
        changed = ["actor.lr", "trainer.total_steps", "trainer.save_every"]
        assert [line["key"] for line in lines_of(run / "changes.jsonl")] == changed
        shutil.rmtree(run / "checkpoints" / "step-000003")


def test_what_may_not_change_is_refused_here_too(run: Path, cli: Cli) -> None:
    ended = cli("resume", run, "--set", "rollout.n=4")
    assert ended.status == 2
    assert "rollout.n: 2 → 4" in ended.err


@pytest.mark.long
def test_files_of_a_project_that_was_moved_are_named_with_the_way_out(run: Path, tmp_path: Path, cli: Cli) -> None:
    config, old = load_config(run / "config.toml"), tmp_path / "old"
    text = (run / "config.toml").read_text(encoding="utf-8")
    text = text.replace(str(config.data.train), str(old / "train.jsonl")).replace(
        str(config.data.val), str(old / "heldout.jsonl")
    )
    reward = config.reward.function
    gone = text.replace(f'"{reward}"', f'"{old / "judge.py"}:judge"')
    (run / "config.toml").write_text(gone, encoding="utf-8")
    more = ["--set", "trainer.total_steps=3"]
    for command in (["resume", run, *more], ["eval", run], ["score", run]):
        ended = cli(*command)
        assert (ended.status, ended.err.count("\n")) == (2, 1)
        assert f"{run / 'config.toml'} names missing files: " in ended.err
        assert f"{old / 'judge.py'} (reward.function)" in ended.err
        assert "restore them, or, if the project was moved, give the new path with --" in ended.err
    assert f"{old / 'train.jsonl'} (data.train)" in cli("resume", run, *more).err
    (run / "config.toml").write_text(text, encoding="utf-8")
    new = [word for which in ("train", "val") for word in ("--set", f"data.{which}={getattr(config.data, which)}")]
    ended = cli("resume", run, *more, *new)
    assert ended.status == 0, ended.err
