"""The overview: several runs on one axis, runs without a summary, and curves that are those of the files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from browser_cases import drawn_lines, read_series

Open = Callable[..., Any]
Serve = Callable[..., str]


def add_metrics(run: Path, metrics: dict[str, float]) -> None:
    """Add metrics to every training step of a run."""
    file = run / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(row | (metrics if "score/mean" in row else {})) + "\n" for row in rows))


def test_lines_of_several_runs_can_be_told_apart(tmp_path: Path, serve: Serve, open_page: Open) -> None:
    from view_runs import sample_run

    runs = [sample_run(tmp_path / name, steps=2) for name in ("first", "second")]
    for run in runs:
        add_metrics(run, {"router/search/lambda": 0.25, "router/search/budget": 0.3, "router/search/mean": 0.4})
    page = open_page(serve(*runs), "#/overview")
    drift = page.locator("[data-title=Drift]")
    drift.locator(".u-series", has_text="second").first.wait_for()
    for title in ("Drift", "λ, the price of the budget", "Score", "Cost", "Spending: search"):
        chart = page.locator(f"[data-title='{title}']")
        looks = chart.locator(".u-series:not(.band) .u-marker").evaluate_all("all => all.map(e => e.style.border)")
        labels = chart.locator(".u-series:not(.band) .u-label").all_inner_texts()
        looks, labels = [look for look in looks if look], [label for label in labels if label != "step"]
        assert len(looks) == len(labels) == len(set(looks)) == len(set(labels)) >= 4, (title, labels, looks)
    assert {"first cost", "first search"} <= drawn_lines(page, "λ, the price of the budget").keys()
    spending = drawn_lines(page, "Spending: search")
    assert spending["second"] == read_series(runs[1], "router/search/mean")
    assert spending["second budget"] == [(1, 0.3), (2, 0.3)]
