"""The overview: several runs on one axis, runs without a summary, and curves that are those of the files."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser_cases import drawn_lines, read_series, wait_until
from view_runs import sample_run

from toolwise.training.run_folder import open_run
from toolwise.view.overview_page import fault_totals
from toolwise.view.rollout_store import RunStore

Open = Callable[..., Any]
Serve = Callable[..., str]


def add_metrics(run: Path, metrics: dict[str, float]) -> None:
    """Add metrics to every training step of a run."""
    file = run / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(row | (metrics if "score/mean" in row else {})) + "\n" for row in rows))


def test_lines_of_several_runs_can_be_told_apart(tmp_path: Path, serve: Serve, open_page: Open) -> None:
    runs = [sample_run(tmp_path / name, steps=2) for name in ("first", "second")]
    for run in runs:
        add_metrics(run, {"router/search/lambda": 0.25, "router/search/budget": 0.3, "router/search/mean": 0.4})
    page = open_page(serve(*runs), "#/overview")
    drift = page.locator("[data-title=Drift]")
    drift.locator(".u-series", has_text="second").first.wait_for()
    for title in ("Drift", "λ, the price of the budget", "Score", "Cost", "Spending: search"):
        chart = page.locator(f"[data-title='{title}']")
        looks = chart.locator(".u-series:not(.unnamed) .u-marker").evaluate_all("all => all.map(e => e.style.border)")
        labels = chart.locator(".u-series:not(.unnamed) .u-label").all_inner_texts()
        looks, labels = [look for look in looks if look], [label for label in labels if label != "step"]
        assert len(looks) == len(labels) == len(set(looks)) == len(set(labels)) >= 4, (title, labels, looks)
    assert page.locator(".unnamed").count() > page.locator(".unnamed:visible").count() == 0
    assert {"first cost", "first search"} <= drawn_lines(page, "λ, the price of the budget").keys()
    spending = drawn_lines(page, "Spending: search")
    assert spending["second"] == read_series(runs[1], "router/search/mean")
    assert spending["second budget"] == [(1, 0.3), (2, 0.3)]


def test_all_charts_come_at_once(sample: Path, serve: Serve, open_page: Open) -> None:
    """Else those of the rollouts come first, and move when those of the metrics do."""
    page, held = open_page(serve(sample), "#/compare"), []
    page.route("**/api/series*", lambda route: held.append(route))
    page.keyboard.press("o")
    page.wait_for_selector(".run-header")
    while not held:
        page.wait_for_timeout(20)
    assert page.locator("figure.chart").count() == 0
    held[0].continue_()
    page.wait_for_selector("figure.chart")
    assert {"Score", "Cost", "Entropy"} <= set(
        page.eval_on_selector_all("figure.chart", "all => all.map(e => e.dataset.title)")
    )


def test_a_run_without_a_summary_shows_its_faults_and_how_rollouts_ended(
    tmp_path: Path, serve: Serve, open_page: Open
) -> None:
    run = sample_run(tmp_path / "crashed", steps=2)
    logged = {"rollouts": 40.0, "faults/rollouts": 3.0, "faults/policy": 2.0, "faults/tool": 5.0, "faults/env": 0.0}
    add_metrics(
        run, logged | {"calls/mean": 1.5, "faults/tool/search": 0.2, "stop/answered": 0.75, "stop/deadline": 0.25}
    )
    page = open_page(serve(run), "#/overview")
    page.wait_for_selector("[data-fault]")
    assert page.locator(".run-header .status").inner_text() == "crashed"
    faults = page.evaluate(
        "[...document.querySelectorAll('[data-fault]')].map(e => [e.dataset.fault, e.cells[1].innerText])"
    )
    assert dict(faults) == {"policy": "4", "tool": "10"}
    assert "faults: policy 4 of 80, tool 10 of 120" in page.inner_text(".facts")
    reasons = RunStore(run).table.to_pylist()
    ended = Counter(row["stop_reason"] for row in reasons if row["phase"] == "train")
    rows = "[...document.querySelectorAll('[data-reason]')].map(e => [e.dataset.reason, e.cells[1].innerText])"
    assert dict(page.evaluate(rows)) == {reason: str(count) for reason, count in ended.items()}
    shutil.rmtree(run / "rollouts")  # nothing is stored, or not yet: what was logged
    (run / "rollouts").mkdir()
    page = open_page(serve(run), "#/overview")
    wait_until(page, f"JSON.stringify({rows}) === JSON.stringify([['answered', '60'], ['deadline', '20']])")


def test_everything_that_was_timed_is_shown(tmp_path: Path, serve: Serve, open_page: Open) -> None:
    run = sample_run(tmp_path / "timed", steps=3)
    times = {"time/step_s": 3.1, "time/router_s": 0.4, "time/alternatives_s": 0.3, "time/level_scores_s": 0.2}
    add_metrics(run, times | {"time/blocks": 2.0, "time/blocked_s": 0.05, "time/checkpoint_copy_s": 0.01})
    page = open_page(serve(run), "#/overview")
    page.wait_for_selector("[data-time]")
    lines = drawn_lines(page, "Time by phase")
    assert lines["router"] == read_series(run, "time/router_s")
    assert [value for _, value in lines["rollouts"]] == [2.0] * 3
    assert [value for _, value in lines["rollouts + thinking"]] == pytest.approx([2.5] * 3)
    assert [value for _, value in lines["rollouts + thinking + update"]] == pytest.approx([3.1] * 3)
    assert {"blocked", "checkpoint copy"} <= lines.keys()
    table = page.evaluate(
        "[...document.querySelectorAll('[data-time]')].map(e => [e.dataset.time, e.cells[1].innerText])"
    )
    assert dict(table) | {"time/router_s": "0.400 s", "time/blocks": "2"} == dict(table)
    assert {name for name, _ in table} == {
        *times,
        *("time/rollout_s", "time/update_s", "time/blocks"),
        "time/blocked_s",
        "time/checkpoint_copy_s",
    }


def test_curves_and_spreads_are_those_of_the_files(trained: Path, serve: Serve, open_page: Open) -> None:
    page = open_page(serve(trained), "#/overview")
    page.wait_for_selector("[data-time]")
    rows = [row for row in RunStore(trained).table.to_pylist() if row["phase"] == "train"]
    steps = sorted({row["step"] for row in rows})
    for title, column in (("Score", "score"), ("Cost", "cost"), ("Sampled tokens", "tokens")):
        lines = drawn_lines(page, title)
        for label, share in (("10 %", 0.1), ("90 %", 0.9)):
            wanted = [np.quantile([row[column] for row in rows if row["step"] == step], share) for step in steps]
            assert [step for step, _ in lines[label]] == steps
            assert [value for _, value in lines[label]] == pytest.approx(wanted)
        if column != "tokens":
            assert lines["training mean"] == read_series(trained, f"{column}/mean")
            assert lines["held-out"] == read_series(trained, f"eval/{column}")
    for title, label, name in (
        ("Correct", "training", "reward/correct/mean"),
        ("Loss", "loss", "loss"),
        ("Speed", "tokens/s", "time/tokens_per_s"),
        ("Entropy", "entropy", "actor/entropy"),
        ("Time by phase", "rollouts", "time/rollout_s"),
        ("Time by phase", "router", "time/router_s"),
        ("Drift", "KL of the update", "actor/kl"),
        ("Drift", "log-prob gap", "canary/logprob_gap_max"),
    ):
        wanted_line = read_series(trained, name)
        if wanted_line and (name != "time/router_s" or any(value for _, value in wanted_line)):
            assert drawn_lines(page, title)[label] == wanted_line, name
    update = dict(read_series(trained, "time/update_s"))
    both = {step: value + update[step] for step, value in read_series(trained, "time/rollout_s")}
    assert dict(drawn_lines(page, "Time by phase")["rollouts + update"]) == pytest.approx(both)


def test_faults_of_a_whole_run_add_up_to_its_summary(trained: Path) -> None:
    folder = open_run(trained)
    assert folder.saved_summary is not None
    logged = fault_totals(folder.metrics)
    assert {name: logged[name] for name in folder.saved_summary["faults"]} == folder.saved_summary["faults"]
