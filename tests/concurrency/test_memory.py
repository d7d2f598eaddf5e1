"""How much memory can be allocated, on a machine and in a container."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from toolwise.concurrency import memory
from toolwise.concurrency.memory import available_memory, free_memory


def test_the_memory_of_a_container_is_within_its_limit(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9000 kB\nMemAvailable:  8000 kB\n")
    assert available_memory(meminfo, tmp_path) == 8000 << 10
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert available_memory(meminfo, tmp_path) == 8000 << 10
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.stat").write_text("anon 400\ninactive_file 500\n")
    assert available_memory(meminfo, tmp_path) == 4500
    assert available_memory(tmp_path / "none", tmp_path / "none") is None


def test_pages_that_files_are_cached_in_count_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 7 << 30)
    assert free_memory() == 7 << 30
    monkeypatch.setattr(memory, "available_memory", lambda: None)
    assert free_memory() > 0


REUSE = """
import resource, sys, threading
import numpy as np
from toolwise.concurrency.memory import keep_freed_memory

def layers(count):
    for _ in range(count):
        kept = [np.full(size << 18, 1.0, np.float32) for size in (9, 15, 9, 24, 24, 9)]

def measure():
    layers(3)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    layers(10)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

if "keep" in sys.argv:
    assert keep_freed_memory()
thread = threading.Thread(target=measure)
thread.start()
thread.join()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_freed_memory_is_kept_for_the_next_arrays() -> None:
    faults = [
        int(subprocess.run([sys.executable, "-c", REUSE, *more], check=True, capture_output=True, text=True).stdout)
        for more in ((), ("keep",))
    ]
    assert faults[1] < faults[0] / 10, "pages that the system provides again"
