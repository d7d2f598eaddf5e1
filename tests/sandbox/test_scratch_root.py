"""Scratch folders of dead processes are removed, those of running ones are not."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from toolwise.sandbox import scratch_root
from toolwise.sandbox.scratch_root import PREFIX, make_root, sweep_roots


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_root_without_an_owner_is_swept(temporary: Path) -> None:
    dead, held = make_root()
    (dead / "1").mkdir()
    os.close(held)
    alive, still_held = make_root()
    assert not dead.exists()
    sweep_roots()
    assert alive.exists()
    os.close(still_held)


def test_a_root_that_is_being_made_is_left(temporary: Path) -> None:
    young = temporary / f"{PREFIX}young"
    young.mkdir()
    old = temporary / f"{PREFIX}old"
    old.mkdir()
    os.utime(old, (time.time() - 9999, time.time() - 9999))
    sweep_roots()
    assert young.exists()
    assert not old.exists()


def test_a_folder_that_was_swept_before_it_was_locked_is_made_again(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = scratch_root._lock
    swept: list[Path] = []

    def lock_after_another_sweeper(root: Path) -> int:
        held = lock(root)
        if not swept:
            swept.append(root)
            shutil.rmtree(root)
        return held

    monkeypatch.setattr(scratch_root, "_lock", lock_after_another_sweeper)
    root, held = make_root()
    assert root.is_dir()
    assert root not in swept
    os.close(held)


def test_folders_of_living_trainers_cost_no_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    root, held = make_root()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        sweep_roots()
    assert root.exists()
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(held)
