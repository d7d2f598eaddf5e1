"""docs/curriculum.md: its snippets run, and its table has every sampler that ships."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.docs.pages import ROOT, Reader

from toolwise.data.samplers import SAMPLERS

pytestmark = pytest.mark.docs


def test_every_snippet_runs(reader: Callable[..., Reader], learning_base: dict[str, Any], tmp_path: Path) -> None:
    reader("docs/curriculum.md", base=learning_base).read()
    assert (tmp_path / "runs" / "stages" / "summary.json").exists()


def test_the_table_has_every_sampler() -> None:
    rows = re.findall(r'^\| `"(\w+)"` \|', (ROOT / "docs" / "curriculum.md").read_text(), flags=re.MULTILINE)
    assert rows == list(SAMPLERS)
