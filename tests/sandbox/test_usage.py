"""What a program takes, seen from outside."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from toolwise.sandbox import usage
from toolwise.sandbox.usage import overfilled, overgrown

linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are counted on Linux")


def test_a_folder_is_full_by_size(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "f").write_bytes(b"x" * 1_500_000)
    assert overfilled([tmp_path], 2) == ""
    assert "1 MB" in overfilled([tmp_path], 1)


def test_folders_count_together(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_bytes(b"x" * 700_000)
    assert overfilled([tmp_path / "a"], 1) == ""
    assert overfilled([tmp_path / "a", tmp_path / "b"], 1)


def test_a_folder_is_full_by_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "MOST_FILES", 3)
    for n in range(4):
        (tmp_path / str(n)).touch()
    assert "3 files" in overfilled([tmp_path], 1)


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"x" * 3_000_000)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "big")
    (tmp_path / "folder" / "loop").symlink_to(tmp_path)
    assert overfilled([tmp_path / "folder"], 1) == ""


@linux
def test_processes_and_their_memory_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "x = bytearray(60_000_000); print(flush=True); input()"
    started = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert started.stdout is not None
    assert started.stdin is not None
    started.stdout.readline()
    assert overgrown(started, "no mark", 500) is None
    grown = overgrown(started, "no mark", 30)
    assert grown is not None
    assert grown[0] == "memory"
    monkeypatch.setattr(usage, "MOST_PROCESSES", 0)
    assert overgrown(started, "no mark", 500) == ("too_big", usage.TOO_MANY)
    started.communicate(b"\n")
