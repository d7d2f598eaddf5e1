"""What a program takes, seen from outside."""

from __future__ import annotations

import subprocess
import sys

import pytest

from toolwise.sandbox import usage
from toolwise.sandbox.usage import overgrown

linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are counted on Linux")


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
