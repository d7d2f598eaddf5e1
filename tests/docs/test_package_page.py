"""docs/package.md, the text that a package index shows: it stands alone, and runs as it is written."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable

import pytest
from tests.docs.pages import ROOT, Reader, Snippet

pytestmark = pytest.mark.docs

NOT_RUN = {
    "pip install toolwise": "needs a package index",
    "toolwise demo": "`make demo` is run by .ci/run",
    "toolwise train my_run.toml --out runs/first": "twenty steps; its dry run comes before it",
}


def is_the_quickstart(snippet: Snippet) -> None:
    """The same program as examples/quickstart.py, which the test of the README runs."""
    assert snippet.text.strip() == (ROOT / "examples" / "quickstart.py").read_text().strip()


def test_every_snippet_runs(reader: Callable[..., Reader]) -> None:
    reader("docs/package.md", not_run=NOT_RUN, handlers={"python": is_the_quickstart}).read()


def test_the_package_needs_no_file_beside_its_description() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    page = ROOT / project["project"]["readme"]
    targets = re.findall(
        r"\]\(([^)]*)\)|<img[^>]*src=[\"']([^\"']*)|^\[[^\]]+\]:\s*(\S+)", page.read_text("utf-8"), re.MULTILINE
    )
    urls = [*("".join(target) for target in targets), *project["project"].get("urls", {}).values()]
    assert [url for url in urls if not url.startswith(("https://", "#"))] == []
    packed = project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert {"src", "docs", "examples", "README.md"} <= set(packed)  # the page says so
