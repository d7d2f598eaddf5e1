"""Copies of a rollout's files: only changes, no followed links, within the limits."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolwise.sandbox.programs import copies
from toolwise.sandbox.programs.copies import (
    CopyLimitError,
    FolderState,
    copy_changes,
    folder_state,
    wait_for_clock_tick,
)
from toolwise.sandbox.scratch import FOLDER_FLAGS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files are copied where there are mount namespaces")
MB = 1 << 20


class Pair:
    """A folder, and its copy."""

    def __init__(self, tmp_path: Path) -> None:
        self.source, self.target = tmp_path / "source", tmp_path / "target"
        self.source.mkdir()
        self.target.mkdir()
        self.descriptors = [os.open(path, FOLDER_FLAGS) for path in (self.source, self.target)]

    def copy(self, before: FolderState | None = None, most: int = MB) -> bool:
        return copy_changes(*self.descriptors, before or {}, most)

    def state(self) -> FolderState:
        wait_for_clock_tick()
        return folder_state(self.descriptors[0])


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    for descriptor in pair.descriptors:
        os.close(descriptor)


def _tree(path: Path) -> dict[str, tuple[int, str]]:
    return {
        str(p.relative_to(path)): (p.lstat().st_mode, os.readlink(p) if p.is_symlink() else p.read_text())
        for p in path.rglob("*")
        if p.is_symlink() or p.is_file()
    }


def test_everything_is_copied_at_first(pair: Pair) -> None:
    (pair.source / "a" / "b").mkdir(parents=True)
    (pair.source / "a" / "b" / "c").write_text("c")
    (pair.source / "run").write_text("#!/bin/sh")
    (pair.source / "run").chmod(0o755)
    (pair.source / "link").symlink_to("/etc/passwd")
    assert pair.copy()
    assert _tree(pair.target) == _tree(pair.source)


def test_nothing_is_done_where_nothing_changed(pair: Pair) -> None:
    (pair.source / "a").write_text("1")
    before = pair.state()
    assert not pair.copy(before)
    assert list(pair.target.iterdir()) == []


def test_only_changes_are_copied(pair: Pair) -> None:
    for name in ("same", "changed", "removed"):
        (pair.source / name).write_text("1")
    (pair.source / "gone" / "far").mkdir(parents=True)
    pair.copy()
    before = pair.state()
    (pair.source / "changed").write_text("2")
    (pair.source / "removed").unlink()
    (pair.source / "new").write_text("3")
    (pair.source / "gone" / "far").rmdir()
    (pair.source / "gone").rmdir()
    (pair.target / "same").write_text("of another call")
    (pair.target / "others").write_text("too")
    assert pair.copy(before)
    texts = {path.name: path.read_text() for path in pair.target.iterdir()}
    assert texts == {"same": "of another call", "others": "too", "changed": "2", "new": "3"}


def test_a_change_of_the_same_size_at_once_is_seen(pair: Pair) -> None:
    (pair.source / "a").write_text("1")
    pair.copy()
    before = pair.state()
    (pair.source / "a").write_text("2")
    assert pair.copy(before)
    assert (pair.target / "a").read_text() == "2"


def test_a_folder_that_moved_is_copied_with_its_files(pair: Pair) -> None:
    (pair.source / "a").mkdir()
    (pair.source / "a" / "f").write_text("1")
    pair.copy()
    before = pair.state()
    (pair.source / "a").rename(pair.source / "b")
    pair.copy(before)
    assert [str(p.relative_to(pair.target)) for p in sorted(pair.target.rglob("*"))] == ["b", "b/f"]


def test_files_and_folders_may_swap_names(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "f").write_text("x")
    (pair.source / "a").mkdir()
    (pair.source / "a" / "f").write_text("1")
    (pair.source / "b").write_text("1")
    pair.copy()
    before = pair.state()
    (pair.source / "a" / "f").unlink()
    (pair.source / "a").rmdir()
    (pair.source / "a").symlink_to(tmp_path / "victim")
    (pair.source / "b").unlink()
    (pair.source / "b").mkdir()
    (pair.source / "b" / "f").write_text("2")
    pair.copy(before)
    assert _tree(pair.target) == _tree(pair.source)
    assert (tmp_path / "victim" / "f").read_text() == "x"


def test_a_link_in_the_way_is_not_followed(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (pair.source / "a").mkdir()
    (pair.source / "a" / "f").write_text("1")
    (pair.target / "a").symlink_to(tmp_path / "victim")
    pair.copy()
    assert list((tmp_path / "victim").iterdir()) == []
    assert (pair.target / "a" / "f").read_text() == "1"


def test_holes_and_hard_links_take_no_more_than_they_did(pair: Pair) -> None:
    (pair.source / "sparse").touch()
    os.truncate(pair.source / "sparse", 1 << 30)
    (pair.source / "one").write_bytes(b"x" * (MB // 2))
    for n in range(20):
        os.link(pair.source / "one", pair.source / f"{n}")
    pair.copy()
    assert (pair.target / "sparse").stat().st_size == 1 << 30
    assert (pair.target / "sparse").stat().st_blocks == 0
    assert (pair.target / "one").stat().st_nlink == 21


def test_too_many_bytes_files_or_folders_are_too_much(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    (pair.source / "a").write_bytes(bytes(MB) + b"x")
    with pytest.raises(CopyLimitError, match="bytes"):
        pair.copy()
    (pair.source / "a").unlink()
    (pair.source / "b" / "c" / "d").mkdir(parents=True)
    for name in ("MAX_FILES", "MAX_FOLDER_DEPTH"):
        with monkeypatch.context() as patch:
            patch.setattr(copies, name, 2)
            with pytest.raises(CopyLimitError, match="files"):
                pair.copy()


def test_long_names_at_a_great_depth_are_too_much(tmp_path: Path) -> None:
    """10,000 of them would take the trainer seconds on every call."""
    at = tmp_path / "source"
    for _ in range(12):
        at = at / ("n" * 250)
    at.mkdir(parents=True)
    for number in range(1_500):
        (at / str(number)).touch()
    folder = os.open(tmp_path / "source", FOLDER_FLAGS)
    try:
        with pytest.raises(CopyLimitError, match="too long"):
            folder_state(folder)
    finally:
        os.close(folder)


def test_unreadable_files_of_the_owner_are_copied(pair: Pair) -> None:
    (pair.source / "d").mkdir()
    (pair.source / "d" / "f").write_text("x")
    (pair.source / "d" / "f").chmod(0)
    (pair.source / "d").chmod(0)
    pair.copy()
    assert (pair.target / "d").stat().st_mode & 0o777 in (0, 0o700)
    (pair.target / "d").chmod(0o700)
    (pair.target / "d" / "f").chmod(0o600)
    assert (pair.target / "d" / "f").read_text() == "x"


def test_pipes_are_left_out(pair: Pair) -> None:
    os.mkfifo(pair.source / "p")
    pair.copy()
    assert list(pair.target.iterdir()) == []
