"""The page of a route: prices, what each route cost and earned, the frontier, odds of every turn, λ over time."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browser_cases import drawn_lines, first_row, read_series, rollout_link, wait_until

from toolwise.view.rollout_store import RunStore
from toolwise.view.router_page import route_names

Open = Callable[..., Any]
Serve = Callable[..., str]


def test_each_route_shows_what_it_cost_and_earned_or_that_it_was_not_tried(
    sample: Path, serve: Serve, open_page: Open
) -> None:
    row = first_row(sample, "step-000001", route="SEARCH-FAMILY")
    page = open_page(serve(sample), rollout_link("router", row))
    page.wait_for_selector("[data-tried]")
    table = page.evaluate(
        "[...document.querySelectorAll('[data-tried]')]"
        ".map(e => [e.dataset.tried, [...e.cells].slice(1).map(c => c.innerText)])"
    )
    tried = [one for one in RunStore(sample).table.to_pylist() if one["task_id"] == row["task_id"]]
    for route, cells in table:
        whole = [one for one in tried if one["route"] == route]
        here = [one for one in whole if one["file"] == "step-000001"]
        wanted: list[str] = []
        for members in (here, whole):
            mean = {name: sum(one[name] for one in members) / max(1, len(members)) for name in ("score", "cost")}
            numbers = [float(len(members)), mean["score"], mean["cost"]]
            texts = [f"{v:.0f}" if v.is_integer() else f"{v:.{d}f}" for v, d in zip(numbers, (0, 3, 2), strict=True)]
            wanted += texts if members else ["not tried"]
        assert cells == wanted, route
    assert ["CALCULATE-FAMILY", ["not tried", "not tried"]] in table
    assert "calls" in page.locator(".card", has_text="Prices").inner_text()
    places = page.evaluate("document.querySelector('.scatter canvas').places.map(([, , p]) => [p.label, p.x, p.y])")
    shown = {label: (x, y) for label, x, y in places}
    for route in ("ANSWER", "SEARCH-FAMILY"):
        members = [one for one in tried if one["route"] == route and one["file"] == "step-000001"]
        mean = [sum(one[name] for one in members) / len(members) for name in ("cost", "score")]
        assert shown[f"{route}, this task"] == pytest.approx(mean)
        assert f"{route}, whole run" in shown


def test_prices_are_those_of_the_settings(tmp_path: Path, serve: Serve, open_page: Open) -> None:
    from view_runs import sample_run

    run = sample_run(tmp_path / "priced", steps=1)
    (run / "config.toml").write_text(
        'tools = ["calculator", "search"]\n[router]\nenable = true\ncost = "prices"\n'
        "[router.prices.cost]\ncalculator = 0.25\nsearch = 1.5\n[[router.budgets]]\nlimit = 0.5\n"
    )
    row = first_row(run, "step-000001", route="SEARCH-FAMILY")
    page = open_page(serve(run), rollout_link("router", row))
    prices = page.locator(".card", has_text="Prices")
    prices.wait_for()
    assert {"calculator, cost\t0.25", "search, cost\t1.50"} <= set(prices.inner_text().splitlines())
    assert "at most 0.50 cost a question" in prices.inner_text()


def test_every_turn_shows_the_odds_it_was_chosen_by(killed: Path, serve: Serve, open_page: Open) -> None:
    row = first_row(killed, "step-000002", steps=2)
    turns = RunStore(killed).record(row).turn_routes
    page = open_page(serve(killed), rollout_link("router", row))
    page.wait_for_selector("[data-turn]")
    assert page.locator("[data-turn]").count() == len(turns) == 2
    for index, turn in enumerate(turns):
        card = page.locator(f"[data-turn='{index}']")
        assert f"turn {index}: {turn['route']}" in card.locator("h3").inner_text()
        shown = card.locator("[data-route]").evaluate_all(
            "all => all.map(e => [e.dataset.route, e.cells[2].dataset.p])"
        )
        odds = {route: float(p) for route, p in shown if p is not None}
        known = [value for value in turn["logits"] if value is not None]
        total = sum(math.exp(value) for value in known)
        names = [n for n, v in zip(route_names(RunStore(killed)), turn["logits"], strict=True) if v is not None]
        assert odds == pytest.approx({n: math.exp(v) / total for n, v in zip(names, known, strict=True)})
        assert odds[turn["route"]] == pytest.approx(math.exp(turn["log_prob"]), abs=1e-5)


def test_the_price_of_the_budget_over_time_is_that_of_the_metrics(killed: Path, serve: Serve, open_page: Open) -> None:
    row = first_row(killed, "step-000002", steps=2)
    page = open_page(serve(killed), rollout_link("router", row))
    page.wait_for_selector("[data-title='λ over time'] .u-legend")
    assert drawn_lines(page, "λ over time")["router/cost/lambda"] == read_series(killed, "router/cost/lambda") != []
    spending = drawn_lines(page, "Spending")
    assert spending["router/cost/mean"] == read_series(killed, "router/cost/mean")
    assert spending["router/cost/budget"] == [(1, 0.3), (2, 0.3)]
    page.goto(f"{serve(killed)}#/overview")
    wait_until(page, "document.querySelector('figure.chart[data-title^=λ]') !== null")
    assert drawn_lines(page, "λ, the price of the budget")["cost"] == read_series(killed, "router/cost/lambda")
