"""Amending a sealed checkpoint: valid before and after, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolwise.errors import CheckpointError
from toolwise.training import checkpoint
from toolwise.training.checkpoint import amend


@pytest.fixture
def saved(tmp_path: Path) -> checkpoint.Checkpoint:
    def fill(folder: Path) -> None:
        (folder / "weights").write_bytes(b"\0" * 1000)
        (folder / "notes.json").write_text("old")

    return checkpoint.save(
        tmp_path, 7, {"a": {"x": 1}}, extra_files={"model": fill}, facts={"of": "me"}, figures={"score": 0.5}
    )


def test_what_is_amended_is_there_and_all_else_is_as_it_was(saved: checkpoint.Checkpoint) -> None:
    amend(saved.path, {"model/notes.json": b"new", "model/more/deep.txt": b"hi"})
    found = checkpoint.load(saved.path)
    assert (found.path / "model/notes.json").read_text() == "new"
    assert (found.path / "model/more/deep.txt").read_text() == "hi"
    assert (found.path / "model/weights").read_bytes() == b"\0" * 1000
    assert (found.step, found.figures) == (7, {"score": 0.5})
    assert found.part("a") == {"x": 1}
    assert [p.name for p in saved.path.parent.iterdir()] == ["step-000007"]
    newest = checkpoint.latest(saved.path.parent)
    assert newest is not None
    assert newest.path == saved.path


def test_figures_and_parts_can_be_amended(saved: checkpoint.Checkpoint) -> None:
    found = amend(saved.path, parts={"a": {"x": 2}}, figures={"score": 0.75, "loss": float("nan")})
    assert found.figures == checkpoint.load(saved.path).figures == {"score": 0.75}
    assert found.part("a") == {"x": 2}
    assert (found.path / "model/notes.json").read_text() == "old"


def test_one_that_was_tampered_with_is_not_given_a_new_seal(saved: checkpoint.Checkpoint) -> None:
    (saved.path / "model/weights").write_bytes(b"\1" * 1000)
    with pytest.raises(CheckpointError, match="sha256"):
        amend(saved.path, {"model/notes.json": b"new"})
    assert (saved.path / "model/notes.json").read_text() == "old"


def test_where_it_cannot_be_written_the_old_one_stays(
    saved: checkpoint.Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(CheckpointError, match="No space left"):
        amend(saved.path, {"model/notes.json": b"new"})
    monkeypatch.undo()
    assert (checkpoint.load(saved.path).path / "model/notes.json").read_text() == "old"
