"""Checkpoints of a run that goes on while they are written: the state of their step, errors, order and cleanup."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

import toolwise
from toolwise.errors import CheckpointError
from toolwise.training import checkpoint
from toolwise.training.run_checkpoints import RunCheckpoints

ROWS = [
    {"task_id": f"t{i}", "prompt": [{"role": "user", "content": f"Which is more, {i} or 7?"}], "ground_truth": "7"}
    for i in range(4)
]


def vowels(messages: Any, ground_truth: Any) -> float:
    """A reward that differs between any two texts of a model that knows nothing."""
    text = messages[-1].content or ""
    return sum(text.count(letter) for letter in "aeiou") / (1 + len(text)) + len(text) / 1000


def settings(**trainer: Any) -> dict[str, Any]:
    return {
        "model": {"device": "cpu"},
        "data": {"batch_size": 2},
        "actor": {"lr": 1e-5},
        "rollout": {"n": 4, "max_new_tokens": 12, "temperature": 3.0},
        "multi_turn": {"max_turns": 1},
        "reward": {"sandbox": {"tier": "off"}},
        "validation": {"before": False},
        "trainer": {"total_steps": 3, "save_every": 1, "keep_checkpoints": 9, "console": False, **trainer},
    }


@dataclass
class Watcher(toolwise.Callback):
    """Notes what happened when, and whether a checkpoint was there when it was reported."""

    steps: int = 0
    saved: list[tuple[int, bool]] = field(default_factory=list)

    def on_step(self, event: toolwise.StepEvent) -> None:
        self.steps = event.step

    def on_checkpoint(self, event: toolwise.CheckpointEvent) -> None:
        self.saved.append((event.step, checkpoint.load(event.path).step == event.step))


def train(out: Path, watcher: Watcher | None = None, *, deterministic: bool = False, **trainer: Any) -> Any:
    callbacks = [watcher] if watcher else []
    config = {"deterministic": deterministic, **settings(**trainer)}
    return toolwise.train(config, tasks=ROWS, val=ROWS[:1], out=out, reward=vowels, callbacks=callbacks)


def slow_save(monkeypatch: pytest.MonkeyPatch, wait: Callable[[int], None]) -> list[threading.Thread]:
    """Each checkpoint is written only when `wait(step)` returns; the threads that wrote."""
    real, threads = checkpoint.save, []

    def save(folder: Path, step: int, *args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread())
        wait(step)
        return real(folder, step, *args, **kwargs)

    monkeypatch.setattr(checkpoint, "save", save)
    return threads


def tensors_of(run: Path, step: int) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    folder = run / "checkpoints" / f"step-{step:06d}"
    return {
        f"{name}/{key}": value
        for name in ("actor", "model/model")
        for key, value in load_file(folder / f"{name}.safetensors").items()
    }


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_checkpoint_written_late_holds_the_state_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights have changed twice by then. Both modes give the same files and figures."""
    train(tmp_path / "sync", Watcher(), deterministic=True, async_checkpoints=False)
    watcher = Watcher()

    def wait(step: int) -> None:  # until the next step has updated the weights
        deadline = time.monotonic() + 20
        while watcher.steps == step < 3 and time.monotonic() < deadline:
            time.sleep(0.001)

    threads = slow_save(monkeypatch, wait)
    train(tmp_path / "async", watcher, deterministic=True)
    assert len(set(threads)) == 3
    assert threading.main_thread() not in threads
    assert watcher.saved == [(1, True), (2, True), (3, True)]
    for step in (1, 2, 3):
        one, other = tensors_of(tmp_path / "sync", step), tensors_of(tmp_path / "async", step)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), step
        names = [
            sorted(p.name for p in (tmp_path / run / "checkpoints" / f"step-{step:06d}" / "model").iterdir())
            for run in ("sync", "async")
        ]
        assert names[0] == names[1]
    one, other = (tensors_of(tmp_path / "async", step) for step in (1, 2))
    assert sum(not torch.equal(one[name], other[name]) for name in one) > len(one) / 2
    lines = [metrics_of(tmp_path / run) for run in ("sync", "async")]
    for one, other in zip(*lines, strict=True):
        apart = ("time/", "engine/")  # how requests share the engine's steps depends on when they arrive
        assert {k: v for k, v in one.items() if not k.startswith(apart)} == {
            k: v for k, v in other.items() if not k.startswith(apart)
        }
    assert list((tmp_path / "async" / "checkpoints").glob(".*")) == []


def test_nothing_stays_behind_if_a_part_has_no_state(tmp_path: Path) -> None:
    class Run(MagicMock):
        def snapshot(self) -> dict[str, Any]:
            raise RuntimeError("no state")

    run = Run()
    run.progress.step, run.learner.weights_to_save.return_value = 1, {}
    saves = RunCheckpoints(run, tmp_path)
    saves._write_small_files = lambda folder: None  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no state"):
        saves.save({})
    assert list(tmp_path.glob("checkpoints/.*")) == []


@pytest.mark.long
def test_a_save_that_outlasts_its_interval_is_waited_for_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_save(monkeypatch, lambda step: time.sleep(0.5 if step == 1 else 0.0))
    watcher = Watcher()
    train(tmp_path / "run", watcher)
    assert watcher.saved == [(1, True), (2, True), (3, True)]
    lines = metrics_of(tmp_path / "run")
    assert "time/checkpoint_copy_s" not in lines[0]
    assert "time/checkpoint_copy_s" in lines[1]
    assert lines[2]["time/checkpoint_wait_s"] > 0.0


@pytest.mark.long
def test_an_error_of_the_disk_ends_the_run_at_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watcher = Watcher()

    def wait(step: int) -> None:
        if step == 2:
            raise CheckpointError(f"cannot write step-{step:06d}: No space left on device")

    slow_save(monkeypatch, wait)
    with pytest.raises(CheckpointError, match="cannot write step-000002: No space left on device"):
        train(tmp_path / "run", watcher, total_steps=5)
    assert watcher.steps <= 3
    assert watcher.saved == [(1, True)]
    monkeypatch.undo()
    result = toolwise.resume(tmp_path / "run", reward=vowels)
    assert result.summary["steps"] == 5


def test_an_error_in_the_last_checkpoint_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(step: int) -> None:
        if step == 3:
            raise CheckpointError("cannot write step-000003: No space left on device")

    slow_save(monkeypatch, wait)
    with pytest.raises(CheckpointError, match="step-000003"):
        train(tmp_path / "run")
