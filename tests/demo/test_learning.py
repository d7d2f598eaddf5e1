"""The demo keeps its promise: the share correct on held-out tasks rises by a quarter or more, whatever the seed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SEEDS = 5


@pytest.mark.long
def test_held_out_share_correct_rises_by_a_quarter_for_four_of_five_seeds(tmp_path: Path) -> None:
    rises = []
    for seed in range(SEEDS):
        out = tmp_path / f"seed-{seed}"
        command = [sys.executable, "-m", "toolwise", "demo", "--seed", str(seed), "--out", str(out)]
        subprocess.run(command, check=True, capture_output=True, timeout=1200)
        summary = json.loads((out / "summary.json").read_text())
        assert summary["before"]["n"] >= 200
        assert 0.4 <= summary["before"]["correct"] <= 0.6
        assert summary["peak_rss_mb"] < 3 * 1024
        rises.append(summary["after"]["correct"] - summary["before"]["correct"])
    assert rises[0] >= 0.25
    assert sum(rise >= 0.25 for rise in rises) >= SEEDS - 1
