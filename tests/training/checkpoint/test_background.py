"""Saving in a thread: the state of its moment, errors that are not lost, times, and a save that is abandoned."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from toolwise.errors import CheckpointError
from toolwise.training.checkpoint import Checkpoint, background, load, save
from toolwise.training.checkpoint.background import BackgroundSaver


class Gate:
    """Writes to `folder` when opened."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.open = folder, threading.Event()
        self.written: list[Any] = []

    def write(self, state: Any, abandoned: Callable[[], bool]) -> Checkpoint:
        assert self.open.wait(20)
        self.written.append(state)
        return save(self.folder, state["step"], {"a": state}, abandoned=abandoned)


def test_training_goes_on_once_the_state_is_copied(tmp_path: Path) -> None:
    saver, gate, weight = BackgroundSaver(), Gate(tmp_path), torch.ones(2)
    saver.start({"w": weight, "step": 1}, gate.write)
    saver.wait_for_copy()
    weight.add_(1.0)
    assert saver.take_result(wait=False) is None
    gate.open.set()
    saved = saver.take_result(wait=True)
    assert saved is not None
    assert load(saved.path).part("a")["w"].tolist() == [1.0, 1.0]
    assert saver.take_result(wait=True) is None  # only once
    assert set(saver.take_metrics()) == {"time/checkpoint_copy_s", "time/checkpoint_wait_s"}
    assert saver.take_metrics() == {}


def test_an_error_is_raised_where_the_result_is_taken() -> None:
    def refuse(state: Any, abandoned: Callable[[], bool]) -> Checkpoint:
        raise CheckpointError("no space left")

    saver = BackgroundSaver()
    saver.start({}, refuse)
    with pytest.raises(CheckpointError, match="no space left"):
        saver.take_result(wait=True)
    assert saver.take_result(wait=True) is None
    with pytest.raises(CheckpointError, match="no space left"):
        BackgroundSaver(background=False).start({}, refuse)


def test_a_copy_that_fails_is_one_line_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = BackgroundSaver()

    def fail(frozen: Any) -> Any:
        raise RuntimeError("CUDA error: out of memory\nmore lines")

    monkeypatch.setattr(saver._copies, "copy", fail)
    saver.start({"w": torch.ones(1)}, Gate(tmp_path).write)
    saver.wait_for_copy()  # does not wait for ever
    with pytest.raises(CheckpointError, match=r"out of memory\): set trainer.async_checkpoints = false"):
        saver.take_result(wait=True)


def test_a_save_that_is_nearly_done_is_not_abandoned(tmp_path: Path) -> None:
    saver, gate = BackgroundSaver(), Gate(tmp_path)
    gate.open.set()
    saver.start({"step": 2}, gate.write)
    assert saver.abandon()
    assert load(tmp_path / "step-000002").step == 2


def test_an_abandoned_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "GRACE_S", 0.01)
    save(tmp_path, 1, {"a": {}})
    saver, gate = BackgroundSaver(), Gate(tmp_path)
    saver.start({"step": 2}, gate.write)
    threading.Timer(0.05, gate.open.set).start()
    assert saver.abandon()
    assert gate.written
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_an_abandoned_save_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "GRACE_S", 0.01)
    monkeypatch.setattr(background, "ABANDON_S", 0.01)
    saver, gate = BackgroundSaver(), Gate(tmp_path)
    saver.start({"step": 2}, gate.write)
    started = time.perf_counter()
    assert not saver.abandon()
    assert time.perf_counter() - started < 2
    gate.open.set()
    assert saver.abandon()  # nothing left to stop


def test_without_memory_for_a_copy_the_write_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "available_memory", lambda: 4_999)
    saver, gate = BackgroundSaver(), Gate(tmp_path)
    gate.open.set()
    state = {"w": torch.zeros(1000), "step": 1}
    saver.start(state, gate.write)
    assert gate.written[0] is state
    assert saver.take_result(wait=False) is not None
    assert "checkpoints are written while training waits" in caplog.text
    monkeypatch.setattr(background, "available_memory", lambda: 5_000)
    roomy = BackgroundSaver()
    roomy.start(state, gate.write)
    assert roomy.take_result(wait=True) is not None
    assert gate.written[1] is not state
