"""Which settings may change on resume, how changes are reported, and how they are recorded."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from setting_keys import setting_keys

from toolwise.config.loader import to_toml
from toolwise.config.paths import relative_paths, resolve_paths
from toolwise.config.schema import RunConfig, load_config
from toolwise.errors import CheckpointError, ConfigError
from toolwise.training.changes import (
    MUTABLE_SETTINGS,
    Change,
    changes_between,
    changes_since,
    check_files,
    check_same_run,
    describe_changes,
    load_run_config,
    portable_config,
    read_changes,
    record_changes,
    resume_command,
    saved_settings,
)


def config_of(**settings: Any) -> RunConfig:
    return RunConfig.model_validate(settings)


def test_every_name_in_the_list_is_a_setting() -> None:
    free = {name for name in MUTABLE_SETTINGS if name.startswith("tools[]")}
    assert set(setting_keys(RunConfig)) >= MUTABLE_SETTINGS - free


@pytest.mark.parametrize(
    "pattern",
    [
        r"trainer\.(?!mode|.*stal).*",
        r"validation\..*",
        r".*timeout_s",
        r".*deadline_s",
        r".*max_concurrent.*",
        r".*lr_schedule",
    ],
)
def test_which_settings_may_change(pattern: str) -> None:
    found = {name for name in setting_keys(RunConfig) if re.fullmatch(pattern, name)}
    assert found
    assert found <= MUTABLE_SETTINGS


@pytest.mark.parametrize(
    "name",
    [
        *("seed", "data.train", "model.path", "rollout.n", "rollout.temperature", "reward.function"),
        *("actor.lora.rank", "trainer.mode", "trainer.max_staleness"),
    ],
)
def test_what_makes_it_another_run_may_not(name: str) -> None:
    assert name not in MUTABLE_SETTINGS


def test_changes_are_listed_individually() -> None:
    before = config_of(actor={"lr": 1e-5}, tools=["calculator", {"name": "search", "timeout_s": 3.0}])
    now = config_of(
        actor={"lr": 2e-5, "schedule_steps": 50},
        tools=["calculator", {"name": "search", "timeout_s": 5.0}],
        reward={"kwargs": {"price": 0.5}},
    )
    found = changes_between(before, now)
    assert [str(change) for change in found] == [
        "tools[1].timeout_s: 3.0 → 5.0",
        "reward.kwargs.price: none → 0.5",
        "actor.lr: 1e-05 → 2e-05",
        "actor.schedule_steps: none → 50",
    ]
    assert [change.allowed for change in found] == [True, False, True, True]
    assert changes_between(now, now) == []


def test_a_long_value_is_cut() -> None:
    assert len(str(Change("a", "x" * 500, "y"))) < 120


def test_the_error_names_all_that_differs(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config_of(seed=1, actor={"lr": 1e-5})), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        check_same_run(config_of(seed=2, rollout={"n": 4}, actor={"lr": 2e-5}), file)
    told = str(caught.value)
    assert "seed: 1 → 2, rollout.n: 8 → 4" in told
    assert "these may change: actor.lr: 1e-05 → 2e-05" in told
    assert f"toolwise resume {tmp_path}" in told
    assert "\n" not in told
    check_same_run(config_of(seed=1, actor={"lr": 2e-5}), file)


def test_the_command_can_be_pasted() -> None:
    assert resume_command(Path("runs/my run")) == "toolwise resume 'runs/my run'"


def test_changes_are_recorded_with_their_step_and_undone_with_it(tmp_path: Path) -> None:
    record_changes(tmp_path, 2, [])
    assert not (tmp_path / "changes.jsonl").exists()
    record_changes(tmp_path, 2, [Change("actor.lr", 1e-5, 2e-5)])
    record_changes(tmp_path, 5, [Change("data.batch_size", 4, 8)])
    assert [line["step"] for line in read_changes(tmp_path)] == [2, 5]
    record_changes(tmp_path, 5, [Change("data.batch_size", 4, 16)])  # the run died before its next checkpoint
    assert describe_changes(tmp_path) == ["step 2: actor.lr: 1e-05 → 2e-05", "step 5: data.batch_size: 4 → 16"]
    record_changes(tmp_path, 2, [])
    assert read_changes(tmp_path) == []


def test_a_checkpoint_s_settings_survive_a_move(tmp_path: Path) -> None:
    folder, moved = tmp_path / "run", tmp_path / "moved"
    folder.mkdir()
    given = {"data": {"train": str(folder / "data" / "train.jsonl")}, "tools": [f"{folder}/code/tool_f.py:f"]}
    saved = json.loads(json.dumps(saved_settings(config_of(**given), folder)))
    folder.rename(moved)
    now = config_of(data={"train": str(moved / "data" / "train.jsonl")}, tools=[f"{moved}/code/tool_f.py:f"])
    assert changes_since(saved, now, moved) == []
    assert [str(c) for c in changes_since(saved, now.model_copy(update={"seed": 3}), moved)] == ["seed: 0 → 3"]
    assert changes_since(None, now, moved) == []
    assert changes_since({"gone": 1}, now, moved) == []


@pytest.mark.parametrize(
    "train", ["{}/a.jsonl", "{}/*.jsonl", ["{}/a.jsonl", "{}/*.json"], [{"path": "{}/*.jsonl", "weight": 1.0}]]
)
def test_task_files_may_be_moved(train: Any, tmp_path: Path) -> None:
    def config(folder: str) -> RunConfig:
        return config_of(data={"train": json.loads(json.dumps(train).replace("{}", str(tmp_path / folder)))})

    def changes() -> list[Change]:
        return changes_since(saved_settings(config("old"), tmp_path), config("new"), tmp_path)

    for folder in ("old", "new"):
        (tmp_path / folder).mkdir()
        for name in ("a.jsonl", "b.json"):
            (tmp_path / folder / name).touch()
    assert not all(change.allowed for change in changes())  # both are there: which data it is may have changed
    shutil.rmtree(tmp_path / "old")
    assert all(change.allowed for change in changes())
    with pytest.raises(ConfigError, match=r"names missing files: .*old"):
        check_files(config("old"), tmp_path, "data.")


def test_a_missing_sampler_is_named(tmp_path: Path) -> None:
    config = config_of(data={"sampler": f"{tmp_path}/stages.py:Stages"})
    with pytest.raises(ConfigError, match=r"names missing files: .*stages\.py \(data\.sampler\)"):
        check_files(config, tmp_path, "data.")
    (tmp_path / "stages.py").touch()
    check_files(config, tmp_path, "data.")


def test_references_into_the_folder_are_relative_to_it(tmp_path: Path) -> None:
    code = tmp_path / "run" / "code"
    given = config_of(
        tools=[
            f"{code}/tool_f.py:f",
            {"name": f"{code}/tool_g.py:g", "price": 1.0},
            "calculator",
            f"{tmp_path}/x.py:h",
        ],
        reward={"parts": [{"function": f"{code}/reward_r.py:r"}, {"function": "a.b:c"}]},
        env={"name": f"{code}/env_E.py:E"},
    )
    found = portable_config(given, tmp_path / "run")
    assert found.tools == [
        "code/tool_f.py:f",
        {"name": "code/tool_g.py:g", "price": 1.0},
        "calculator",
        f"{tmp_path}/x.py:h",
    ]
    assert [part.function for part in found.reward.parts] == ["code/reward_r.py:r", "a.b:c"]
    assert found.env.name == "code/env_E.py:E"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(to_toml(found), encoding="utf-8")
    assert load_config(tmp_path / "run" / "config.toml") == given


def test_a_folder_without_a_run_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no run to resume \(it has no config\.toml\)"):
        load_run_config(tmp_path)
    with pytest.raises(ConfigError, match=r"holds no run to resume \(it does not exist\)"):
        load_run_config(tmp_path / "none")
    (tmp_path / "config.toml").write_text("seed = x\n", encoding="utf-8")
    with pytest.raises(CheckpointError, match="not valid TOML"):
        load_run_config(tmp_path)


def test_relative_paths_are_the_inverse_of_resolved_ones(tmp_path: Path) -> None:
    settings = {
        "data": {"train": "data/train.jsonl", "val": None},
        "env": {"name": "code/env.py:Env", "interaction": "code/user.py:User"},
        "reward": {"function": "", "parts": [{"function": "code/reward.py:f"}]},
        "tools": ["calculator", "code/tool.py:t", {"name": "code/tool.py:u", "price": 2.0}],
        "trainer": {"trackers": ["code/tracker.py:T", {"name": "code/tracker.py:U"}]},
    }
    resolved = resolve_paths(settings, tmp_path)
    assert resolved["env"]["interaction"] == f"{tmp_path}/code/user.py:User"
    assert relative_paths(resolved, tmp_path) == settings
    assert relative_paths(resolved, tmp_path / "elsewhere") == resolved


def test_a_run_of_before_calibration_keeps_all_its_training_tasks(tmp_path: Path) -> None:
    recorded = to_toml(RunConfig())
    without = "\n".join(line for line in recorded.splitlines() if not line.startswith("calibration"))
    assert without != recorded
    (tmp_path / "config.toml").write_text(without)
    config = load_run_config(tmp_path)
    assert isinstance(config, RunConfig)
    assert config.router.calibration == 0
    check_same_run(config, tmp_path / "config.toml")
    (tmp_path / "config.toml").write_text(recorded)
    config = load_run_config(tmp_path)
    assert isinstance(config, RunConfig)
    assert config.router.calibration == RunConfig().router.calibration
