"""docs/data.md: every snippet runs as it is written, and what it shows beside them is what comes out."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.docs.pages import ROOT, Reader, Snippet, read_snippets

from toolwise.data import load_tasks
from toolwise.data.files import write_rows
from toolwise.errors import DataError

pytestmark = pytest.mark.docs


def expect_error(snippet: Snippet) -> None:
    """The error that the page shows is the error that such a row gives."""
    before = Path("train.jsonl").read_text()
    bad = {"prompt": "a", "extra_info": {"tools_kwargs": {"search": {"excute_kwargs": {"k": 1}}}}}
    Path("train.jsonl").write_text('{"prompt": "a"}\n' * 2 + json.dumps(bad))
    with pytest.raises(DataError) as caught:
        load_tasks("train.jsonl")
    assert f"{caught.value}\n" == snippet.text
    Path("train.jsonl").write_text(before)


def write_sources(folder: Path) -> None:
    """The files that the page's mixtures name."""
    for name in ("math/a.parquet", "math/b.parquet", "tools.jsonl", "heldout/x/y.jsonl"):
        write_rows([{"prompt": f"{name} {number}", "ground_truth": "1"} for number in range(4)], folder / name)


def test_every_snippet_runs(reader: Callable[..., Reader], tmp_path: Path) -> None:
    data = ROOT / "tests" / "fixtures"
    (tmp_path / "gsm8k").mkdir()
    for split in ("train", "test"):
        shutil.copy(data / "gsm8k.jsonl", tmp_path / "gsm8k" / f"{split}.jsonl")
    shutil.copy(data / "rlla_sft.json", tmp_path)
    write_sources(tmp_path)
    write_rows([{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(4)], tmp_path / "questions.jsonl")
    page = reader("docs/data.md", handlers={"text": expect_error})
    page.read()
    assert len(page.names["tasks"]) == 16
    assert json.loads(json.dumps(page.names["place"])) == page.names["place"]
    assert_comments_are_values(page)


def assert_comments_are_values(page: Reader) -> None:
    shown_by = next(s.text for s in read_snippets(page.page) if s.language == "python")
    shown = re.findall(r"^task\.(\w+) +# ([^:\n]+(?::[^\n]*\})?)", shown_by, re.MULTILINE)
    assert [name for name, _ in shown] == ["task_id", "tools", "ground_truth", "reward_kwargs"]
    for name, text in shown:
        assert repr(getattr(page.names["task"], name)) == text
