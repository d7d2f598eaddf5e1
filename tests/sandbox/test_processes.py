"""Worker processes: their environment and how they are ended."""

from __future__ import annotations

import os
import select
from pathlib import Path

import pytest

from toolwise.sandbox.processes import _environment, start_process, sweep_leftovers


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
