"""docs/async.md: its snippets run, and its table has every correction."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from tests.docs.pages import ROOT, Reader

from toolwise.config.correction import CorrectionName

pytestmark = pytest.mark.docs


def test_every_snippet_runs(reader: Callable[..., Reader], learning_base: dict[str, Any], tmp_path: Path) -> None:
    reader("docs/async.md", base=learning_base).read()
    assert (tmp_path / "runs" / "async" / "summary.json").exists()


def test_the_table_has_every_correction() -> None:
    text = (ROOT / "docs" / "async.md").read_text()
    rows = re.findall(r'^\| `"(\w+)"` \|.*`(\w+\.py)` \|$', text, flags=re.MULTILINE)
    assert [name for name, _ in rows] == list(get_args(CorrectionName))
    for _, file in rows:
        assert (ROOT / "src" / "toolwise" / "learner" / "corrections" / file).exists()
