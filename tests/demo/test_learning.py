"""The demo keeps its promises, whatever the seed: the share correct on held-out tasks rises by a quarter or more. What
is delivered costs the budget, and comes near to the oracle for what it costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from toolwise.demo.recipe import BUDGET
from toolwise.frontier.rollout_pool import ALL_TOOLS

SEEDS = 5


@pytest.mark.long
def test_four_of_five_seeds_learn_and_all_keep_to_the_budget(tmp_path: Path) -> None:
    rises, gaps = [], []
    for seed in range(SEEDS):
        out = tmp_path / f"seed-{seed}"
        command = [sys.executable, "-m", "toolwise", "demo", "--seed", str(seed), "--out", str(out)]
        subprocess.run(command, check=True, capture_output=True, timeout=1200)
        summary = json.loads((out / "summary.json").read_text())
        assert summary["before"]["n"] >= 200
        assert 0.3 <= summary["before"]["correct"] <= 0.6
        assert summary["peak_rss_mb"] < 3 * 1024
        rises.append(summary["after"]["correct"] - summary["before"]["correct"])
        frontier = json.loads((out / "frontier.json").read_text())
        gaps.append(frontier["as_delivered"]["gap_closed"]["value"])
        assert summary["calibration"]["units"]["cost"]["cost"] == pytest.approx(BUDGET)
        delivered, error = (summary["after"][f"budget/cost/{name}"] for name in ("delivered", "stderr"))
        assert abs(delivered - BUDGET) <= 0.05 * BUDGET + 2 * error, f"seed {seed} delivers {delivered} ± {error}"
        assert frontier["fixed"][ALL_TOOLS]["cost"]["value"] > BUDGET, "the budget binds"
    assert rises[0] >= 0.25
    assert sum(rise >= 0.25 for rise in rises) >= SEEDS - 1
    assert sum(gap >= 0.7 for gap in gaps) >= SEEDS - 1
