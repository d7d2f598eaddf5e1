"""docs/routing.md: the sections on one's own routes and router run as they are written. The rest needs data and
hours."""

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


@pytest.mark.parametrize("title", ["One currency", "The agent knows its budget"])
def test_budgets_run(
    title: str, reader: Callable[..., Reader], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (pages.ROOT / "docs" / "routing.md").read_text(encoding="utf-8")
    section = page.partition(f"## {title}")[2].partition("\n## ")[0]
    (tmp_path / "section.md").write_text(section, encoding="utf-8")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    reader("section.md").read()


def test_routes_of_ones_own_run(reader: Callable[..., Reader], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As written, but for the address of the second model."""
    from toolwise.models import load_model
    from toolwise.policies.local import LocalPolicy
    from toolwise.protocols import Sampling
    from toolwise.serve import ServedModel, Server, build_app

    page = (pages.ROOT / "docs" / "routing.md").read_text(encoding="utf-8")
    section = page.partition("## Routes of your own")[2].partition("\n## ")[0]
    served = ServedModel.of(
        LocalPolicy(*load_model("builtin:small", device="cpu"), Sampling(max_new_tokens=16)), "large"
    )
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    with Server(build_app(served)) as server:
        written = section.replace("http://127.0.0.1:8000/v1", server.url)
        (tmp_path / "section.md").write_text(written, encoding="utf-8")
        reader("section.md").read()
