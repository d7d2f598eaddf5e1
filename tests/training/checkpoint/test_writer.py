"""Saving: which files are written, and which checkpoints are kept and removed."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from toolwise.errors import CheckpointError
from toolwise.training.checkpoint import best, load, save, settings_digest


def write_model(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "shards").mkdir()
    (folder / "shards" / "one.safetensors").write_bytes(b"weights")


def test_a_model_folder_travels_with_the_checkpoint(tmp_path: Path) -> None:
    path = save(tmp_path, 4, {"a": {}}, extra_files={"model": write_model}).path
    listed = json.loads((path / "manifest.json").read_text())["files"]
    assert sorted(listed) == ["a.json", "model/config.json", "model/shards/one.safetensors"]
    (path / "model" / "shards" / "one.safetensors").write_bytes(b"weightz")
    with pytest.raises(CheckpointError, match=r"one\.safetensors is not what was saved"):
        load(path)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in range(1, 8):
        save(tmp_path, step, {"a": {"step": step}}, keep_last=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000006", "step-000007"]


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-by-step").mkdir()
    for step in (1, 2):
        save(tmp_path, step, {"a": {}}, keep_last=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "step-000002", "step-by-step"]


def test_a_run_that_went_back_leaves_no_later_ones_to_resume_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (10, 20):
        save(tmp_path, step, {"a": {}})
    save(tmp_path, 11, {"a": {}}, keep_last=3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000010", "step-000011"]
    assert "step-000020: the run was rolled back to step 11" in caplog.text


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, {"a": {}}, keep_last=3)
    (tmp_path / "step-000003" / "a.json").write_text("")
    save(tmp_path, 4, {"a": {}}, keep_last=3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000001", "step-000002", "step-000004"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 5, {"a": {"n": 1}, "b": {}})
    save(tmp_path, 5, {"a": {"n": 2}})
    assert load(tmp_path / "step-000005").state() == {"a": {"n": 2}}
    assert [p.name for p in tmp_path.iterdir()] == ["step-000005"]


def names_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_best_is_kept_beside_the_last(tmp_path: Path) -> None:
    for step, score in enumerate([0.2, 0.8, 0.3, 0.8, 0.5, 0.1], start=1):
        save(tmp_path, step, {"a": {}}, figures={"score": score}, keep_last=2, keep_best="score")
    assert names_of(tmp_path) == ["step-000002", "step-000005", "step-000006"]  # the earlier of two equals
    found = best(tmp_path, "score")
    assert found is not None
    assert (found.step, found.figures) == (2, {"score": 0.8})


def test_a_better_one_takes_the_place_of_the_best(tmp_path: Path) -> None:
    for step, score in enumerate([0.5, 0.2, 0.9, 0.1], start=1):
        save(tmp_path, step, {"a": {}}, figures={"score": score}, keep_last=1, keep_best="score")
    assert names_of(tmp_path) == ["step-000003", "step-000004"]


def test_a_metric_with_a_minus_is_minimized(tmp_path: Path) -> None:
    for step, cost in enumerate([3.0, 1.0, 2.0], start=1):
        save(tmp_path, step, {"a": {}}, figures={"cost": cost}, keep_last=1, keep_best="-cost")
    assert names_of(tmp_path) == ["step-000002", "step-000003"]


def test_one_within_its_budget_comes_before_all_that_exceed_theirs(tmp_path: Path) -> None:
    """And among those that exceed it, the one that does so least."""
    overspent = {1: (0.9, 0.4), 2: (0.8, 0.2), 3: (0.95, 0.4)}
    for step, (score, over) in overspent.items():
        figures = {"score": score, "budget/overspend": over}
        save(tmp_path, step, {"a": {}}, figures=figures, keep_last=1, keep_best="score")
    assert names_of(tmp_path) == ["step-000002", "step-000003"]
    for step, score in ((4, 0.1), (5, 0.3), (6, 0.2)):
        save(
            tmp_path, step, {"a": {}}, figures={"score": score, "budget/overspend": 0.0}, keep_last=1, keep_best="score"
        )
    assert names_of(tmp_path) == ["step-000005", "step-000006"]
    found = best(tmp_path, "score")
    assert found is not None
    assert found.step == 5


def test_one_without_the_figure_is_no_candidate(tmp_path: Path) -> None:
    figures: list[dict[str, float]] = [{"score": 0.1}, {}, {"cost": 9.0}, {"score": float("nan")}]
    for step, found in enumerate(figures, start=1):
        save(tmp_path, step, {"a": {}}, figures=found, keep_last=1, keep_best="score")
    assert names_of(tmp_path) == ["step-000001", "step-000004"]
    assert load(tmp_path / "step-000004").figures == {}


def test_a_damaged_best_is_not_kept_for_its_name(tmp_path: Path) -> None:
    for step, score in ((1, 0.9), (2, 0.5)):
        save(tmp_path, step, {"a": {}}, figures={"score": score}, keep_last=1, keep_best="score")
    (tmp_path / "step-000001" / "a.json").unlink()
    save(tmp_path, 3, {"a": {}}, figures={"score": 0.1}, keep_last=1, keep_best="score")
    assert names_of(tmp_path) == ["step-000002", "step-000003"]


def test_facts_and_figures_are_sealed_and_restored(tmp_path: Path) -> None:
    facts = {"policy_version": 7, "config_sha256": settings_digest({"b": 1, "a": [2]})}
    save(tmp_path, 7, {"a": {}}, facts=facts, figures={"score": 1 / 3})
    found = load(tmp_path / "step-000007")
    assert (found.facts, found.figures) == (facts, {"score": 1 / 3})
    assert found.facts["config_sha256"] == settings_digest({"a": [2], "b": 1}) != settings_digest({"a": [2], "b": 2})
    manifest = tmp_path / "step-000007" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"policy_version": 7', '"policy_version": 8'))
    with pytest.raises(CheckpointError, match="changed after it was written"):
        load(tmp_path / "step-000007")


def test_leftovers_of_a_crash_are_restored_unless_replaced(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, {"a": {"step": step}}, keep_last=9)
    (tmp_path / "step-000001").rename(tmp_path / "step-000001.old-1-a")
    shutil.copytree(tmp_path / "step-000002", tmp_path / "step-000002.old-1-b")
    (tmp_path / "step-000003").rename(tmp_path / "step-000003.old-1-c")
    (tmp_path / "step-000003").mkdir()  # damaged in a way that no crash could cause
    save(tmp_path, 4, {"a": {"step": 4}}, keep_last=9)
    assert names_of(tmp_path) == [f"step-{step:06d}" for step in (1, 2, 3, 4)]
    assert [load(path).state()["a"]["step"] for path in sorted(tmp_path.iterdir())] == [1, 2, 3, 4]


def test_leftovers_that_cannot_be_removed_do_not_stop_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "step-000001.tmp-77").mkdir()

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    assert save(tmp_path, 2, {"a": {}}).step == 2
    assert "old checkpoints" in caplog.text
    assert "Permission denied" in caplog.text


def test_leftovers_of_a_crash_are_swept_up(tmp_path: Path) -> None:
    for name in ("step-000001.tmp-77", "step-000002.old-77-abc"):
        (tmp_path / name / "model").mkdir(parents=True)
    save(tmp_path, 3, {"a": {}})
    assert [p.name for p in tmp_path.iterdir()] == ["step-000003"]


def test_a_full_disk_is_one_line_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1, {"a": {}})

    def fill(folder: Path) -> None:
        (folder / "half").write_bytes(b"x")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CheckpointError, match=r"cannot write .*step-000002: No space left on device"):
        save(tmp_path, 2, {"a": {}}, extra_files={"model": fill})
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


def test_a_state_outlives_its_files(tmp_path: Path) -> None:
    state = save(tmp_path, 1, {"a": {"w": torch.ones(4)}}).state()
    save(tmp_path, 2, {"a": {}}, keep_last=1)
    maps = Path("/proc/self/maps")
    assert not maps.exists() or "a.safetensors" not in maps.read_text()
    assert state["a"]["w"].tolist() == [1.0] * 4
