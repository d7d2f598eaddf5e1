"""docs/trackers.md: every snippet runs as it is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.docs.pages import BASE, Reader, merged

pytestmark = pytest.mark.docs


def test_every_snippet_runs(reader: Callable[..., Reader], tmp_path: Path) -> None:
    # A run that learns nothing ends with status 3: this reward differs between any two replies.
    (tmp_path / "varied.py").write_text(
        "def varied(messages, ground_truth):\n    return sum(map(ord, messages[-1]['content'])) % 101 / 101\n"
    )
    changes = {"rollout": {"temperature": 3.0}, "reward": {"function": "varied.py:varied", "sandbox": {"tier": "off"}}}
    reader("docs/trackers.md", base=merged(BASE, changes)).read()
    assert (tmp_path / "runs" / "csv" / "scores.csv").read_text().startswith("1,score/mean,")
