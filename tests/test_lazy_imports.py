"""Packages that import their names on first use: all names are there, and workers do not load what they do not need."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest


@pytest.mark.parametrize("package", ["toolwise", "toolwise.types", "toolwise.rewards", "toolwise.tools"])
def test_every_public_name_is_there(package: str) -> None:
    module = importlib.import_module(package)
    assert all(getattr(module, name) is not None for name in module.__all__)


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'toolwise\.types' has no attribute 'Rolout'"):
        importlib.import_module("toolwise.types").Rolout  # noqa: B018


@pytest.mark.parametrize(
    ("worker", "unneeded"),
    [
        ("toolwise.sandbox.worker_main", {"toolwise.types.rollouts", "toolwise.rewards.align", "asyncio"}),
        (
            "toolwise.tools.isolation.tool_worker_main",
            {"toolwise.tools.catalog", "toolwise.data", "toolwise.tools.mcp"},
        ),
    ],
)
def test_a_worker_loads_only_what_it_needs(worker: str, unneeded: set[str]) -> None:
    program = f"import sys, {worker}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not unneeded & set(done.stdout.split())
