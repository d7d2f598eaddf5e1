"""A folder to follow a page in, with the tasks that a configuration names."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.docs.pages import BASE, Reader, merged


@pytest.fixture
def reader(tmp_path: Path, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Reader]:
    """`reader("docs/tools.md", base={…})`: somebody about to read a page, in a folder with tasks to train on."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "train.jsonl").write_text(
        '{"prompt": "What is 48 + 24?", "ground_truth": "72"}\n{"prompt": "What is 3 + 4?", "ground_truth": "7"}\n'
    )

    def make(page: str, **settings: Any) -> Reader:
        return Reader(page, tmp_path, cli, **{"base": BASE, **settings})

    return make


@pytest.fixture
def learning_base(tmp_path: Path) -> dict[str, Any]:
    """The base of a page that trains: a run that learns nothing ends with status 3, and this reward differs between any
    two replies."""
    (tmp_path / "varied.py").write_text(
        "def varied(messages, ground_truth):\n    return sum(map(ord, messages[-1]['content'])) % 101 / 101\n"
    )
    changes = {"rollout": {"temperature": 3.0}, "reward": {"function": "varied.py:varied", "sandbox": {"tier": "off"}}}
    return merged(BASE, changes)
