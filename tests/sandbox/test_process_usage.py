"""Resource usage of a program, measured from outside."""

from __future__ import annotations

import subprocess
import sys

import pytest

from toolwise.sandbox import process_usage
from toolwise.sandbox.process_usage import find_usage_violation

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
    assert find_usage_violation(started, "no mark", 500) is None
    grown = find_usage_violation(started, "no mark", 30)
    assert grown is not None
    assert grown[0] == "memory"
    monkeypatch.setattr(process_usage, "MAX_PROCESSES", 0)
    assert find_usage_violation(started, "no mark", 500) == ("too_big", process_usage.TOO_MANY_PROCESSES)
    started.communicate(b"\n")
