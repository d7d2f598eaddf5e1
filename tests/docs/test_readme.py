"""README.md: its configuration and its commands run as they are written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.docs.pages import BASE, ROOT, Reader, Snippet

from toolwise.models import BUILTIN

pytestmark = pytest.mark.docs

NOT_RUN = {
    "make demo": "`make demo` is run by .ci/run",
    "make test": "this test is part of it",
    "pip install toolwise": "needs a package index",
}
REWARD = """
def score(messages, ground_truth):
    # The small model solves none of GSM8K, and a run without a difference to learn from ends with status 3.
    return sum(map(ord, messages[-1].content or "")) % 10 / 10
"""


def is_the_quickstart(snippet: Snippet) -> None:
    """The same program as examples/quickstart.py, which the test below runs."""
    assert snippet.text.strip() == (ROOT / "examples" / "quickstart.py").read_text().strip()


def test_every_snippet_runs(reader: Callable[..., Reader], tmp_path: Path, cli: Callable[..., object]) -> None:
    # What the configuration names: a model, prepared data and a reward.
    shutil.copytree(BUILTIN / "small", tmp_path / "path" / "to" / "a" / "huggingface" / "folder")
    (tmp_path / "my_rewards.py").write_text(REWARD)
    for split in ("train", "test"):
        cli("data", "prepare", "gsm8k", ROOT / "tests/fixtures/gsm8k.jsonl", "--out", f"data/gsm8k/{split}.parquet")
    sizes = {key: value for key, value in BASE.items() if key != "reward"}
    sizes["data"] = {"batch_size": 1, "limit": 2, "val_limit": 1}
    sizes["rollout"] = {"max_new_tokens": 8}
    reader("README.md", base=sizes, not_run=NOT_RUN, handlers={"python": is_the_quickstart}).read()
    assert (tmp_path / "runs" / "first" / "report.html").is_file()


def test_the_quickstart_learns(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "quickstart.py")],
        cwd=tmp_path,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    before, arrow, after, report = done.stdout.strip().splitlines()[-1].split()
    assert arrow == "->"
    assert float(before) == 0.0
    assert float(after) > 0.5
    assert (tmp_path / report).is_file()
    summary = json.loads((tmp_path / report).with_name("summary.json").read_bytes())
    assert (summary["updated"], summary["diagnosis"]) == (True, [])  # a healthy run raises no alarm
