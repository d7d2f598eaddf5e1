"""docs/async.md: its snippets run, and its table has every correction."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from tests.docs.pages import BASE, ROOT, Reader, merged

from toolwise.config.correction import CorrectionName

pytestmark = pytest.mark.docs


def test_every_snippet_runs(reader: Callable[..., Reader], tmp_path: Path) -> None:
    # A run that learns nothing ends with status 3: this reward differs between any two replies.
    (tmp_path / "varied.py").write_text(
        "def varied(messages, ground_truth):\n    return sum(map(ord, messages[-1]['content'])) % 101 / 101\n"
    )
    changes = {"rollout": {"temperature": 3.0}, "reward": {"function": "varied.py:varied", "sandbox": {"tier": "off"}}}
    reader("docs/async.md", base=merged(BASE, changes)).read()
    assert (tmp_path / "runs" / "async" / "summary.json").exists()


def test_the_table_has_every_correction() -> None:
    text = (ROOT / "docs" / "async.md").read_text()
    rows = re.findall(r'^\| `"(\w+)"` \|.*`(\w+\.py)` \|$', text, flags=re.MULTILINE)
    assert [name for name, _ in rows] == list(get_args(CorrectionName))
    for _, file in rows:
        assert (ROOT / "src" / "toolwise" / "learner" / "corrections" / file).exists()
