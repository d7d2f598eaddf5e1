"""How much memory can be allocated, on a machine and in a container."""

from __future__ import annotations

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
