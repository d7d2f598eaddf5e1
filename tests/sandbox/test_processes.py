"""Worker processes: their environment, their end, and folders that resist."""

from __future__ import annotations

import os
import select
from pathlib import Path

import pytest

from toolwise.sandbox.processes import _environment, start_process, sweep_leftovers
from toolwise.sandbox.scratch import remove_folder


def test_the_environment_holds_nothing_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SECRET_KEY", "x")
    names = set(_environment(tmp_path, "m"))
    assert "SECRET_KEY" not in names
    assert _environment(tmp_path, "m")["HOME"] == str(tmp_path)


def test_a_process_has_its_own_session_and_ends_with_its_folder(tmp_path: Path) -> None:
    scratch = tmp_path / "1"
    scratch.mkdir()
    process = start_process(scratch)
    assert select.select([process.channel], [], [], 30)[0]
    assert os.getsid(process.pid) == process.pid != os.getsid(0)
    assert process.threads() in (1, None)
    assert process.end(sweep=True) == -9
    assert not scratch.exists()
    assert process.popen.poll() is not None


def test_a_sweep_with_nothing_to_find_is_quiet() -> None:
    sweep_leftovers(2**22 + 1, "no such mark")


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "outside")
    remove_folder(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
    assert (tmp_path / "outside" / "kept").exists()


def test_a_folder_too_deep_for_recursion_is_removed(tmp_path: Path) -> None:
    home = os.getcwd()
    try:
        os.chdir(tmp_path)
        os.mkdir("top")
        os.chdir("top")
        for _ in range(1500):
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.chdir(home)
    remove_folder(tmp_path / "top")
    assert not (tmp_path / "top").exists()
