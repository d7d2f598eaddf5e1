"""docs/rewards.md: every snippet runs as it is written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.docs.pages import BASE, Reader

pytestmark = pytest.mark.docs


def test_every_snippet_runs(reader: Callable[..., Reader], tiny_run: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_run, tmp_path / "runs" / "first")  # the run whose rollouts are scored again
    base = {key: value for key, value in BASE.items() if key != "reward"}
    reader("docs/rewards.md", base=base).read()
