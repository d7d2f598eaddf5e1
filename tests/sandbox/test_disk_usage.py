"""Disk usage measured from outside: named files, unlinked files and size-limited file systems."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolwise.sandbox import disk_usage
from toolwise.sandbox.disk_usage import Disk, counts_writes
from toolwise.sandbox.scratch import FOLDER_FLAGS

MB = 1 << 20
ME = "/proc/self"
linux = pytest.mark.skipif(sys.platform != "linux", reason="files without names are found in /proc")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path.resolve() / "folder"
    path.mkdir()
    return path


@pytest.fixture
def disk(folder: Path) -> Iterator[Disk]:
    disk = Disk([folder], 2)
    yield disk
    disk.close()


def _nobody() -> list[str]:
    return []


def _me() -> list[str]:
    return [ME]


def test_a_folder_is_full_by_size(folder: Path, disk: Disk) -> None:
    (folder / "a").mkdir()
    (folder / "a" / "f").write_bytes(b"x" * (MB + MB // 2))
    assert disk.overflow_reason(_nobody) == ""
    (folder / "a" / "g").write_bytes(b"x" * MB)
    assert "2 MB" in disk.overflow_reason(_nobody)


def test_folders_count_together(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        (folder / "f").write_bytes(b"x" * 700_000)
    for count, full in ((1, False), (2, True)):
        disk = Disk(folders[:count], 1)
        assert bool(disk.overflow_reason(_nobody)) == full
        disk.close()


def test_a_folder_is_full_by_files(folder: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_usage, "MAX_FILES", 3)
    for n in range(4):
        (folder / str(n)).touch()
    assert "3 files" in disk.overflow_reason(_nobody)


def test_links_are_not_followed_and_hard_ones_count_once(tmp_path: Path, folder: Path, disk: Disk) -> None:
    (tmp_path / "big").write_bytes(b"x" * 3 * MB)
    (folder / "link").symlink_to(tmp_path / "big")
    (folder / "loop").symlink_to(tmp_path)
    (folder / "file").write_bytes(b"x" * MB)
    for n in range(5):
        os.link(folder / "file", folder / f"{n}")
    assert disk.overflow_reason(_nobody) == ""


def test_what_is_never_written_takes_no_room(folder: Path, disk: Disk) -> None:
    (folder / "sparse").touch()
    os.truncate(folder / "sparse", 1 << 30)
    assert disk.overflow_reason(_nobody) == ""


def test_paths_longer_than_any_call_takes_are_counted(folder: Path, disk: Disk) -> None:
    at = os.open(folder, FOLDER_FLAGS)
    for _ in range(30):
        os.mkdir("n" * 200, dir_fd=at)
        below = os.open("n" * 200, FOLDER_FLAGS, dir_fd=at)
        os.close(at)
        at = below
    file = os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=at)
    os.write(file, bytes(3 * MB))
    os.close(file)
    os.close(at)
    assert disk.overflow_reason(_nobody)


def test_deep_nesting_counts_as_too_much(folder: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_usage, "MAX_FOLDER_DEPTH", 3)
    (folder / "a" / "b").mkdir(parents=True)
    assert disk.overflow_reason(_nobody) == ""
    (folder / "a" / "b" / "c").mkdir()
    assert disk.overflow_reason(_nobody)


def test_a_wide_folder_takes_few_descriptors(folder: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(50):
        (folder / str(n)).mkdir()
    most, inside = 0, disk_usage.open_subfolder

    def watch(*args: int | str) -> int | None:
        nonlocal most
        most = max(most, len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0)
        return inside(*args)  # type: ignore[arg-type]

    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    monkeypatch.setattr(disk_usage, "open_subfolder", watch)
    disk.overflow_reason(_nobody)
    assert most <= before + 5


@linux
@pytest.mark.skipif(os.getuid() == 0, reason="root may list every folder")
def test_a_folder_that_may_be_written_but_not_listed_is_counted(folder: Path, disk: Disk) -> None:
    (folder / "a").mkdir(mode=0o300)
    (folder / "a" / "f").write_bytes(bytes(3 * MB))
    assert disk.overflow_reason(_nobody)


@linux
def test_files_without_names_count_while_a_process_keeps_them(folder: Path, disk: Disk) -> None:
    with open(folder / "f", "wb") as file:
        file.write(bytes(3 * MB))
        file.flush()
        os.unlink(folder / "f")
        assert disk.overflow_reason(_nobody) == ""
        assert disk.overflow_reason(_me)
        assert not disk.is_empty(_me)
    assert disk.overflow_reason(_me) == ""
    assert disk.is_empty(_nobody)


@linux
def test_maps_of_files_without_names_count(folder: Path, disk: Disk) -> None:
    """In Python a map also holds a descriptor; only a child process has the map without one."""
    code = (
        "import ctypes, os, sys\nlibc = ctypes.CDLL(None)\nlibc.mmap.restype = ctypes.c_void_p\n"
        "x = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)\nos.write(x, bytes(3 << 20))\nos.unlink(sys.argv[1])\n"
        "assert libc.mmap(None, 4096, 1, 2, x, ctypes.c_long(0))\nos.close(x)\nprint(flush=True)\ninput()"
    )
    words = [sys.executable, "-c", code, str(folder / "f")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert disk.overflow_reason(lambda: [f"/proc/{child.pid}"])
        child.communicate(b"\n")


@linux
def test_a_map_of_unknown_size_counts_as_the_maximum(disk: Disk) -> None:
    assert disk._size_of_map("/proc/self", "0-1000") == 2 * MB


@linux
def test_what_was_written_is_noticed_in_no_time(folder: Path, disk: Disk) -> None:
    with tempfile.TemporaryFile(dir=folder) as file:
        disk.may_have_grown("/proc/thread-self")
        file.write(bytes(MB))
        file.flush()
        assert disk.may_have_grown("/proc/thread-self")
        assert not disk.is_untouched()


@linux
def test_whether_writes_are_counted_is_found_out(folder: Path) -> None:
    descriptor = os.open(folder, FOLDER_FLAGS)
    assert counts_writes(descriptor) in (True, False)
    assert os.listdir(descriptor) == []
    os.close(descriptor)


@linux
def test_a_map_of_ours_is_found_by_its_descriptor(folder: Path, disk: Disk) -> None:
    with open(folder / "f", "w+b") as file:
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096):
            os.unlink(folder / "f")
            assert not disk.is_empty(_me)
