"""docs/algorithms.md: every snippet runs as it is written, and the tables name what there is."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.docs.pages import BASE, ROOT, Reader, merged

from toolwise.advantages import ESTIMATORS
from toolwise.protocols import AdvantageEstimator

pytestmark = pytest.mark.docs


def test_every_snippet_runs(reader: Callable[..., Reader], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A run that learns nothing ends with status 3: this reward differs between any two replies.
    (tmp_path / "varied.py").write_text(
        "def varied(messages, ground_truth):\n    return sum(map(ord, messages[-1]['content'])) % 101 / 101\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    changes = {"rollout": {"temperature": 3.0}, "reward": {"function": "varied.py:varied", "sandbox": {"tier": "off"}}}
    reader("docs/algorithms.md", base=merged(BASE, changes)).read()
    sys.modules.pop("my_algorithm")
    metrics = [json.loads(line) for line in (tmp_path / "runs" / "python" / "metrics.jsonl").read_text().splitlines()]
    assert any("baseline/best" in line and "actor/clip_frac" in line for line in metrics)


def test_the_tables_are_complete() -> None:
    text = (ROOT / "docs" / "algorithms.md").read_text()
    built_in, _, rest = text.partition("## Write an estimator")
    assert set(re.findall(r'`"(\w+)"`', built_in)) == set(ESTIMATORS)
    members = {name for name in vars(AdvantageEstimator) if not name.startswith("_")} - {"rewards"}
    assert set(re.findall(r"^\| `(\w+)(?:\(score\))?` \|", rest, flags=re.MULTILINE)) == members
