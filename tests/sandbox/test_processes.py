"""Worker processes: their environment and how they are ended."""

from __future__ import annotations

import os
import select
from pathlib import Path

import pytest

from toolwise.sandbox.process_tree import sweep_leftovers
from toolwise.sandbox.processes import clean_environment, start_process


def test_the_environment_holds_nothing_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SECRET_KEY", "x")
    names = set(clean_environment(tmp_path, tmp_path))
    assert "SECRET_KEY" not in names
    assert clean_environment(tmp_path, tmp_path)["HOME"] == str(tmp_path)


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
