"""docs/sft.md: every snippet runs as it is written, with the sizes that the page gives."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.docs.pages import ROOT, Reader, Snippet

from toolwise.training import sft_findings

pytestmark = pytest.mark.docs


def test_every_snippet_runs(reader: Callable[..., Reader], tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"

    def row(snippet: Snippet) -> None:
        assert re.search(r"`chats\.jsonl`:\s*\Z", (ROOT / snippet.page).read_text().split(snippet.text)[0][:-8])
        with chats.open("a") as file:
            file.write(json.dumps(json.loads(snippet.text)) + "\n")
        (tmp_path / "held-out.jsonl").write_text(chats.read_text())

    def config(snippet: Snippet) -> None:
        assert snippet.file == "sft.toml"
        (tmp_path / snippet.file).write_text(snippet.text)

    reader("docs/sft.md", handlers={"json": row, "toml": config}).read()
    for name, steps in (("taught", 30), ("tools", 10), ("sums", 20), ("best", 10), ("adapters", 10)):
        summary = json.loads((tmp_path / "runs" / name / "summary.json").read_text())
        assert (summary["steps"], summary["interrupted"]) == (steps, False)
        assert summary["loss"] < summary["first_loss"]
        assert (tmp_path / "runs" / name / "model.safetensors").is_file()


def test_every_finding_is_on_the_page() -> None:
    source = Path(sft_findings.__file__).read_text()
    kinds = re.findall(r'Finding\("(\w+)"', source)
    assert len(kinds) == 5
    page = (ROOT / "docs/sft.md").read_text()
    assert [kind for kind in kinds if f"`{kind}`" not in page] == []
