"""Fixtures for the reward checks: a reward file, and the sample rollouts as stored ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from sample_rollouts import sample_rows

from toolwise.checks.reward.stored_rollouts import StoredRollout, read_rollouts

MakeStored = Callable[..., list[StoredRollout]]


@pytest.fixture
def make_stored(tmp_path: Path) -> MakeStored:
    """`make_stored(rows)`: rows as they come back from a file; without any, the sample of `toolwise init`."""

    def make(rows: Iterable[dict[str, Any]] | None = None, name: str = "rollouts.jsonl") -> list[StoredRollout]:
        path = tmp_path / name
        path.write_text("".join(f"{json.dumps(row)}\n" for row in (sample_rows() if rows is None else rows)))
        return read_rollouts(path)

    return make


@pytest.fixture
def make_reward(tmp_path: Path) -> Callable[[str], str]:
    """`make_reward(body)`: a reference to a function `judge` in a new file."""

    def make(code: str) -> str:
        path = tmp_path / "judge.py"
        path.write_text(code)
        return f"{path}:judge"

    return make
