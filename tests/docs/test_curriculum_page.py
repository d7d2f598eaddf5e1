"""docs/curriculum.md: its snippets run, and its table has every sampler that ships."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.docs.pages import BASE, ROOT, Reader, merged

from toolwise.data.samplers import SAMPLERS

pytestmark = pytest.mark.docs


def test_every_snippet_runs(reader: Callable[..., Reader], tmp_path: Path) -> None:
    # A run that learns nothing ends with status 3: this reward differs between any two replies.
    (tmp_path / "varied.py").write_text(
        "def varied(messages, ground_truth):\n    return sum(map(ord, messages[-1]['content'])) % 101 / 101\n"
    )
    changes = {"rollout": {"temperature": 3.0}, "reward": {"function": "varied.py:varied", "sandbox": {"tier": "off"}}}
    reader("docs/curriculum.md", base=merged(BASE, changes)).read()
    assert (tmp_path / "runs" / "stages" / "summary.json").exists()


def test_the_table_has_every_sampler() -> None:
    rows = re.findall(r'^\| `"(\w+)"` \|', (ROOT / "docs" / "curriculum.md").read_text(), flags=re.MULTILINE)
    assert rows == list(SAMPLERS)
