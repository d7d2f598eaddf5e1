"""docs/routing.md: the section on one's own router runs as it is written. The rest needs data and hours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.docs import pages
from tests.docs.pages import Reader

pytestmark = pytest.mark.docs


def test_a_router_of_ones_own_runs(
    reader: Callable[..., Reader], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (pages.ROOT / "docs" / "routing.md").read_text(encoding="utf-8")
    section = page.partition("## A router of your own")[2].partition("\n## ")[0]
    (tmp_path / "section.md").write_text(section, encoding="utf-8")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    reader("section.md").read()
