"""scripts/five_seeds.py reads what a run and its frontier really write."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np

from toolwise.frontier.rollout_pool import ALL_TOOLS, OutcomeTable
from toolwise.frontier.router_comparison import RouteValues, compute_frontier
from toolwise.routing.budget import delivered_metrics

SCRIPT = Path(__file__).parents[2] / "scripts" / "five_seeds.py"


def test_a_row_is_about_the_router_as_delivered() -> None:
    routes, rows = ("ANSWER", "SEARCH-FAMILY"), 40
    needed = np.arange(rows) % 2
    scores, costs = np.ones((rows, 3, 2)), np.ones((rows, 3, 2))
    scores[needed == 1, 0] = 0.0
    costs[:, 0] = 0.0
    outcomes = OutcomeTable(tuple(map(str, range(rows))), (*routes, ALL_TOOLS), scores, costs)
    blind = RouteValues(np.full((rows, 2), np.log(0.5)))
    frontier = compute_frontier(
        outcomes, {"router": blind}, [0.5], routes=routes, replicates=10, delivered=np.eye(2)[needed]
    ).to_json()
    after = {"correct": 0.9, "cost": 0.5} | delivered_metrics([{"cost": 0.0}, {"cost": 1.0}] * 10, {"cost": 0.5}, None)
    summary = {"before": {"correct": 0.5, "cost": 0.1}, "after": after, "seconds": 100.0, "peak_rss_mb": 700.0}
    row = runpy.run_path(str(SCRIPT))["row"](3, summary, frontier)
    assert row[:8] == ["3", "0.500", "0.900", "+0.400", "0.10", "0.50", "0.115", "0.50"]
    assert row[8:10] == ["100%", "1.00 for 1.00"], "of the thresholds, not of the head that knows nothing"
