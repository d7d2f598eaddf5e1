"""A frontier as tables, plot and JSON."""

from __future__ import annotations

import json

import numpy as np
from rich.console import Console

from toolwise.frontier.rollout_pool import ALL_TOOLS, OutcomeTable
from toolwise.frontier.router_comparison import Frontier, RouteValues, compute_frontier
from toolwise.view.frontier import frontier_tables, rename_old_curves, render_frontier

ROUTES = ("ANSWER", "SEARCH-FAMILY", "CALCULATE-FAMILY")


def frontier(*, classifier: bool = True) -> Frontier:
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 2, (30, 4, 2)).astype(float)
    costs = np.tile(np.array([0.0, 1.0, 1.0, 1.5])[:, None], (30, 1, 2))
    outcomes = OutcomeTable(tuple(map(str, range(30))), (*ROUTES, ALL_TOOLS), scores, costs)
    routers = {"router": RouteValues(np.log(rng.dirichlet([1, 1, 1], 30)))}
    if classifier:
        routers["classifier"] = RouteValues(np.log(rng.dirichlet([1, 1, 1], 30)))
    return compute_frontier(outcomes, routers, [0.0, 0.5], routes=ROUTES, replicates=50)


def shown(found: Frontier, width: int) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for table in frontier_tables(found.to_json(), "a run"):
        console.print(table)
    return console.export_text()


def test_the_tables_fit_a_terminal_and_hold_every_baseline() -> None:
    text = shown(frontier(), 80)
    assert "…" not in text
    for name in ("router", "classifier", "random", "oracle", "always SEARCH-FAMILY", ALL_TOOLS, "router ahead by"):
        assert name in text
    alone = shown(frontier(classifier=False), 80)
    assert "router ahead by" not in alone
    assert "lead of router" in alone


def test_the_json_is_json_and_has_nulls_where_there_is_no_number() -> None:
    found = frontier().to_json()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["gap_closed"]["router"][0]["value"] is None  # at no cost there is no gap between random and oracle
    assert set(found["curves"]) >= {"router", "classifier", "random", "oracle"}
    point = found["curves"]["router"][1]
    assert point["cost"]["low"] <= point["cost"]["value"] <= point["cost"]["high"]


def test_old_names_of_curves_are_replaced() -> None:
    old = {
        "rows": 3,
        "curves": {"router": [{"budget": 0.1}], "best blind lottery": [], "oracle, other draws": [], "random": []},
        "fixed": {"told the kinds, as trained": {"cost": 1.0}, "ALL-TOOLS": {"cost": 2.0}},
        "as_trained": {"told the kinds": 1, "told the kinds, cost": 2, "ahead of told the kinds": 3},
        "notes": ["no OTC actor"],
    }
    assert rename_old_curves(old) == {
        "rows": 3,
        "curves": {"router": [{"budget": 0.1}], "best fixed mixture": [], "oracle, held-out draws": [], "random": []},
        "fixed": {"oracle labels, sampled, not calibrated": {"cost": 1.0}, "ALL-TOOLS": {"cost": 2.0}},
        "as_trained": {"oracle labels": 1, "oracle labels, cost": 2, "ahead of oracle labels": 3},
        "notes": ["no OTC actor"],
    }
    new = frontier().to_json()
    assert rename_old_curves(new) == new


def test_the_picture_is_a_png() -> None:
    png = render_frontier(frontier().to_json(), name="a run")
    assert png.startswith(b"\x89PNG\r\n")
    assert len(png) > 10_000
