"""Routing in the report: spending against the budget, λ, shares, and the frontier."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolwise.errors import CheckpointError
from toolwise.training.run_folder import open_run
from toolwise.view.curves import DARK
from toolwise.view.frontier import budget_rows, read_frontier, render_frontier
from toolwise.view.panels import budget_units, logged_routes, render_routing, render_thinking, routing_columns
from toolwise.view.report import write_report

PNG = b"\x89PNG"


def add_router(run: Path, units: tuple[str, ...] = ("cost",)) -> None:
    file = run / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    for line in lines:
        if "score/mean" in line:
            line |= {"router/r_task": 0.5, "router/entropy": 0.9, "router/share/SEARCH-FAMILY": 0.25}
            line |= {"router/share/ANSWER": 0.5, "router/share/CALCULATE-FAMILY": 0.25}
            for unit in units:
                line |= {f"router/{unit}/budget": 0.4, f"router/{unit}/mean": 0.45, f"router/{unit}/lambda": 0.8}
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def figure(value: float | None) -> dict[str, float | None]:
    return {
        "value": value,
        "low": None if value is None else value - 0.1,
        "high": None if value is None else value + 0.1,
    }


def point(cost: float, score: float, budget: float | None = None) -> dict[str, Any]:
    return {"budget": budget, "cost": figure(cost), "score": figure(score)}


def a_frontier() -> dict[str, Any]:
    curve = [point(0.0, 0.3, 0.0), point(0.39, 0.7, 0.4)]
    return {
        "rows": 12,
        "draws": 4,
        "curves": {"router": curve, "random": curve, "oracle": curve},
        "fixed": {"always ANSWER": point(0.0, 0.31), "ALL-TOOLS": point(1.2, 0.98), "<b>": point(0.1, 0.32)},
        "gap_closed": {"router": [figure(None), figure(0.95)]},
        "at_its_cost": {"random": [figure(0.3), figure(0.5)], "oracle": [figure(0.3), figure(0.72)]},
    }


def test_a_run_without_a_router_has_no_such_sections(make_run: Callable[..., Path]) -> None:
    run = make_run()
    assert render_routing(open_run(run)) is None
    assert read_frontier(open_run(run)) is None
    page = write_report(run).read_text("utf-8")
    assert "<h2>Routing</h2>" not in page
    assert "<h2>Frontier</h2>" not in page


def test_a_routed_run_shows_spending_price_and_shares(make_run: Callable[..., Path]) -> None:
    run = make_run()
    add_router(run)
    opened = open_run(run)
    assert budget_units(opened.metric_names) == ["cost"]
    assert logged_routes(opened) == ["ANSWER", "SEARCH-FAMILY", "CALCULATE-FAMILY"]
    for drawn in (render_routing(opened), render_routing(opened, DARK)):
        assert drawn is not None
        assert drawn.startswith(PNG)
    page = write_report(run).read_text("utf-8")
    assert "<h2>Routing</h2>" in page
    for name in ("router/cost/lambda", "router/cost/mean", "router/share/ANSWER"):
        assert f"<th>{name}</th>" in page


def test_several_budgets_are_drawn_each(make_run: Callable[..., Path]) -> None:
    run = make_run()
    add_router(run, ("usd", "seconds"))
    opened = open_run(run)
    assert budget_units(opened.metric_names) == ["seconds", "usd"]
    assert render_routing(opened) is not None
    columns = routing_columns(opened.metric_names)
    assert columns[:4] == ["router/seconds/mean", "router/seconds/lambda", "router/usd/mean", "router/usd/lambda"]


def test_a_router_alone_is_not_thinking(make_run: Callable[..., Path]) -> None:
    run = make_run()
    add_router(run)
    assert render_thinking(open_run(run)) is None


def test_the_frontier_stands_on_the_page(make_run: Callable[..., Path]) -> None:
    run = make_run()
    (run / "frontier.json").write_text(json.dumps(a_frontier()))
    page = write_report(run).read_text("utf-8")
    assert "<h2>Frontier</h2>" in page
    assert "<td>0.4</td><td>0.390</td><td>0.700 [0.60 0.80]</td><td>0.500</td><td>0.720</td><td>95%</td>" in page
    assert "<td>all-tools</td>" in page
    assert "&lt;b&gt;" in page


def test_a_frontier_of_an_earlier_version_is_shown_with_the_new_names(make_run: Callable[..., Path]) -> None:
    run = make_run()
    stored = a_frontier()
    stored["fixed"]["told the kinds, as trained"] = point(0.65, 0.98)
    (run / "frontier.json").write_text(json.dumps(stored))
    record = read_frontier(open_run(run))
    assert record is not None
    assert record["fixed"]["oracle labels, sampled, not calibrated"] == point(0.65, 0.98)
    page = write_report(run).read_text("utf-8")
    assert "<td>oracle labels, sampled, not calibrated</td>" in page
    assert "told the kinds" not in page


def test_what_is_no_number_is_a_dash() -> None:
    assert budget_rows(a_frontier())[0][-1] == "–"


def test_the_picture_is_drawn_in_both_palettes() -> None:
    assert render_frontier(a_frontier()) != render_frontier(a_frontier(), DARK)


@pytest.mark.parametrize("text", ["{", "[]", '{"curves": {}}'])
def test_a_frontier_that_cannot_be_read_says_so(make_run: Callable[..., Path], text: str) -> None:
    run = make_run()
    (run / "frontier.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"frontier.json: cannot be read .* delete it"):
        write_report(run)
