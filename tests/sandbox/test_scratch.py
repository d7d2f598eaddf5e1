"""Emptying folders that hostile code has filled or still changes, without touching anything outside."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from toolwise.sandbox import scratch
from toolwise.sandbox.scratch import FOLDER_FLAGS, empty_folder, remove_folder, remove_in_background, remove_root

EXCHANGE = 2


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A folder outside, which must not change."""
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "file").write_text("x")
    (folder / "file").chmod(0o400)
    folder.chmod(0o500)
    yield folder
    assert folder.stat().st_mode & 0o777 == 0o500
    assert (folder / "file").stat().st_mode & 0o777 == 0o400
    assert (folder / "file").read_text() == "x"
    folder.chmod(0o700)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "folder"
    path.mkdir()
    return path


def _empty(path: Path, seconds: float = 20.0) -> bool:
    descriptor = os.open(path, FOLDER_FLAGS)
    try:
        return empty_folder(descriptor, seconds)
    finally:
        os.close(descriptor)


def _nest(folder: Path, depth: int, name: str = "d") -> None:
    at = os.open(folder, FOLDER_FLAGS)
    for _ in range(depth):
        os.mkdir(name, dir_fd=at)
        below = os.open(name, FOLDER_FLAGS, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)


def test_links_are_removed_and_not_followed(folder: Path, victim: Path) -> None:
    (folder / "a").mkdir()
    for name in ("link", "a/link"):
        (folder / name).symlink_to(victim)
    (folder / "circle").symlink_to("circle")
    assert remove_folder(folder)
    assert not folder.exists()


def test_a_link_in_the_place_of_the_folder_is_removed(folder: Path, victim: Path) -> None:
    (folder / "link").symlink_to(victim)
    assert remove_folder(folder / "link")
    assert list(folder.iterdir()) == []


def test_any_depth_takes_few_descriptors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _nest(folder, 300)
    most = 0

    def watch(*args: object, **kwargs: object) -> int:
        nonlocal most
        most = max(most, len(os.listdir("/proc/self/fd")))
        return os.open(*args, **kwargs)  # type: ignore[arg-type]

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(scratch, "_open", watch)
    assert _empty(folder)
    assert list(folder.iterdir()) == []
    assert most <= before + 6


def test_paths_longer_than_any_call_takes_are_no_matter(folder: Path) -> None:
    _nest(folder, 40, "n" * 255)
    assert _empty(folder)
    assert list(folder.iterdir()) == []


def test_names_that_are_used_for_moving_may_be_taken(folder: Path) -> None:
    first = next(scratch._numbers)
    for number in range(first, first + 4):
        (folder / f".removed-{number}" / "x" / "y").mkdir(parents=True)
        (folder / f".removed-{number + 4}").write_text("x")
    (folder / "a" / "b" / "c").mkdir(parents=True)
    assert _empty(folder)
    assert list(folder.iterdir()) == []


def test_folders_closed_to_their_owner_are_opened_by_descriptor(folder: Path) -> None:
    for mode in (0, 0o100, 0o300, 0o500):
        (folder / str(mode) / "below").mkdir(parents=True)
        (folder / str(mode) / "file").write_text("x")
        (folder / str(mode) / "below").chmod(mode)
        (folder / str(mode)).chmod(mode)
    folder.chmod(0o500)
    assert _empty(folder)
    assert list(folder.iterdir()) == []


def test_time_is_limited_and_leftovers_are_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(50):
        (folder / str(number)).mkdir()
    assert not _empty(folder, -1.0)
    monkeypatch.setattr(scratch, "_rmdir", _refuse)
    monkeypatch.setattr(scratch, "_unlink", _refuse)
    assert not remove_folder(folder)
    with caplog.at_level(logging.WARNING):
        remove_root(folder)
    assert "remove it by hand" in caplog.text


def _refuse(*_: object, **__: object) -> None:
    raise PermissionError(1, "immutable")


@pytest.mark.parametrize("fault", [OSError(5, "I/O"), PermissionError(13, "no"), FileNotFoundError(2, "gone")])
def test_errors_are_never_raised(folder: Path, monkeypatch: pytest.MonkeyPatch, fault: OSError) -> None:

    def fail(*_: object, **__: object) -> None:
        raise fault

    for name in ("_scandir", "_unlink", "_rmdir", "_rename", "_open"):
        with monkeypatch.context() as patch:
            (folder / "a" / "b").mkdir(parents=True, exist_ok=True)
            patch.setattr(scratch, name, fail)
            _empty(folder, 0.2)
            remove_folder(folder, 0.2)
    assert remove_folder(folder) or not folder.exists()


def test_a_missing_folder_counts_as_removed(tmp_path: Path) -> None:
    assert remove_folder(tmp_path / "nowhere")
    assert remove_folder(tmp_path / "no" / "where")


def test_slow_removal_continues_in_the_background(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _nest(folder, 200)
    monkeypatch.setattr(scratch, "FOREGROUND_REMOVE_S", -1.0)
    remove_in_background(folder)
    for thread in threading.enumerate():
        if thread.name == "toolwise-sandbox-sweep":
            thread.join(10)
    assert not folder.exists()


class _Thread(threading.Thread):
    """Repeats an action until stopped, ignoring failures."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._work, self._done = work, False

    def run(self) -> None:
        while not self._done:
            with suppress(OSError):
                self._work()

    def stop(self) -> None:
        self._done = True
        self.join()


def _exchange(one: Path, two: Path) -> Callable[[], object]:
    rename, names = ctypes.CDLL(None).renameat2, (bytes(one), bytes(two))
    return lambda: rename(-100, names[0], -100, names[1], EXCHANGE)


def _race(folder: Path, victim: Path, rounds: int) -> None:
    a, b, c = folder / "a", folder / "b", folder / "c"
    threads = [_Thread(_exchange(a, b)), _Thread(_exchange(a, c)), _Thread(_exchange(b, c))]
    threads += [_Thread(a.mkdir), _Thread(lambda: b.symlink_to(victim)), _Thread(c.touch)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(rounds):
            began = time.monotonic()
            _empty(folder, 0.05)
            assert time.monotonic() - began < 5.0
    finally:
        for thread in threads:
            thread.stop()
    assert _empty(folder)
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "renameat2"), reason="exchanges are Linux's")
def test_a_folder_is_emptied_while_its_entries_are_swapped(folder: Path, victim: Path) -> None:
    _race(folder, victim, 5)


@pytest.mark.long
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "renameat2"), reason="exchanges are Linux's")
def test_a_folder_is_emptied_many_times_while_its_entries_are_swapped(folder: Path, victim: Path) -> None:
    _race(folder, victim, 400)
