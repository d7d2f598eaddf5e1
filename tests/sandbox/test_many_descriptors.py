"""A trainer with more than 1,024 open files, where `select` fails: rewards and programs still run."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from toolwise.sandbox import ProgramSandbox, Sandbox

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the layers are Linux's")
TIERS = ["basic", "standard", pytest.param("namespaced", marks=pytest.mark.namespaced)]


@pytest.fixture(autouse=True)
def _many() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limits[1] < 2048:
        pytest.skip("no more files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, limits[1]))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    yield
    for descriptor in held:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("tier", TIERS)
def test_rewards_are_called(tmp_path: Path, tier: Any) -> None:
    (tmp_path / "r.py").write_text("def f(messages, truth): return float(len(truth))")
    with Sandbox(tier, timeout_s=20.0, workers=1) as sandbox:
        if not sandbox.report().complete:
            pytest.skip(sandbox.describe())
        large = "x" * 4_000_000  # more than a socket takes at once
        result = sandbox.evaluate(f"{tmp_path / 'r.py'}:f", [{"role": "user", "content": "x"}], large)
    assert result.error is None, result.error
    assert result.score == len(large)


@pytest.mark.parametrize(
    ("language", "tier", "text"),
    [
        ("python", "basic", "print(6 * 7)"),
        ("shell", "standard", "sleep 300 & echo $((6 * 7))"),
        pytest.param("shell", "namespaced", "sleep 300 & echo $((6 * 7))", marks=pytest.mark.namespaced),
    ],
)
def test_programs_run(language: Any, tier: Any, text: str) -> None:
    sandbox = ProgramSandbox(language, tier, timeout_s=20.0, permissions=["subprocess"] if language == "shell" else [])
    folder = sandbox.open_folder()
    result = asyncio.run(sandbox.run(text, folder))
    asyncio.run(sandbox.close_folder(folder))
    sandbox.close()
    assert (result.kind, result.stdout) == ("ok", "42\n")
    assert result.left_running == (language == "shell")
