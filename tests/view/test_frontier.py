"""A frontier as tables, plot and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
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


def captions(record: Mapping[str, Any]) -> list[str]:
    return [str(table.caption or "") for table in frontier_tables(record, "a run")]


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


def known_frontier() -> Frontier:
    """Of 30 rows a third needs no tools, a third one, and a third several; a second router may also choose all tools,
    which cost no more than one."""
    needed = np.array([0, 1, 3])[np.arange(30) % 3]
    scores = np.zeros((30, 4, 2))
    scores[np.arange(30), needed] = scores[:, 3] = 1.0
    costs = np.tile(np.array([0.0, 1.0, 1.0, 1.0])[:, None], (30, 1, 2))
    outcomes = OutcomeTable(tuple(map(str, range(30))), (*ROUTES, ALL_TOOLS), scores, costs)
    values = np.full((30, 4), -1e3)
    values[:, 0], values[:, 3] = np.where(needed == 0, 0.9, 0.1) + np.arange(30) / 1e3, 0.0
    routers = {
        "router": RouteValues(np.log(np.random.default_rng(0).dirichlet([1, 1, 1], 30))),
        "confidence": RouteValues(values, samples=False, columns=(*ROUTES, ALL_TOOLS)),
    }
    return compute_frontier(outcomes, routers, [0.5], routes=ROUTES, replicates=20)


def test_what_is_not_routed_is_shown_with_its_own_cost_and_score() -> None:
    found = frontier()
    (line,) = [line for line in shown(found, 80).splitlines() if line.startswith(f"│ {ALL_TOOLS}") and "+" in line]
    cells = [cell.strip() for cell in line.strip("│").split("│")]
    fixed, own = found.fixed[ALL_TOOLS], found.against_fixed[ALL_TOOLS]
    figures = (fixed.cost, fixed.score, own["cost"], own["score"])
    assert cells[:5] == [ALL_TOOLS, *(f"{figure.value:.3f}" for figure in figures)]
    assert fixed.cost.value == pytest.approx(1.5)
    assert own["cost"].value < 1.2
    assert any(f"needs less than {ALL_TOOLS}" in caption for caption in captions(found.to_json()))


def test_more_than_the_whole_gap_is_explained() -> None:
    found = known_frontier()
    assert found.gap_closed["confidence"][0].value > 1.0
    assert found.beyond_routes == {"confidence": [ALL_TOOLS]}
    explained = f"above 100%: it may choose {ALL_TOOLS}, the oracle only routes"
    assert any(explained in caption for caption in captions(found.to_json()))
    assert not any("above 100%" in caption for caption in captions(frontier().to_json()))
    assert "…" not in shown(found, 80)
    older = {key: value for key, value in found.to_json().items() if key != "beyond_routes"}
    assert len(frontier_tables(older, "a run")) == len(frontier_tables(found.to_json(), "a run"))


def test_costs_that_differ_at_a_budget_are_pointed_out() -> None:
    record = frontier().to_json()
    (point,) = record["curves"]["classifier"][1:]
    for factor, told in ((1.02, False), (1.2, True), (0.8, True)):
        for name in ("router", "classifier"):
            for each in record["curves"][name]:
                each["cost"]["value"] = 0.5
        point["cost"]["value"] = 0.5 * factor
        assert any("compare the gaps closed" in caption for caption in captions(record)) == told, factor


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
