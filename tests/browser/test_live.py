"""Pages about a run that goes on: each step appears without a reload, and so does its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browser_cases import STEPS, Training, drawn_lines, first_row, read_series, rollout_link, wait_until

Open = Callable[..., Any]
Serve = Callable[..., str]
PER_STEP = 32
"""Rollouts: 8 tasks, 4 of each."""


def wait_for_curve(page: Any, run: Any, steps: list[int]) -> None:
    """Until the curve of the scores has exactly these steps, with the values of the file."""
    deadline, line = time.monotonic() + 10, []
    while [step for step, _ in line] != steps:
        assert time.monotonic() < deadline, line
        page.wait_for_timeout(50)
        charts = page.locator("[data-title=Score]").count()
        line = drawn_lines(page, "Score").get("training mean", []) if charts else []
    assert line == read_series(run, "score/mean")[: len(steps)]


def watch(open_page: Open, address: str) -> tuple[Any, Any]:
    """The overview and the table of a run, marked so that a reload would be noticed."""
    pages = open_page(address, "#/overview"), open_page(address, "#/rollouts?phase=train&sort=step&desc=true")
    for page in pages:
        page.evaluate("window.never_reloaded = true")
    return pages


def assert_never_reloaded(*pages: Any) -> None:
    assert [page.evaluate("window.never_reloaded") for page in pages] == [True] * len(pages)


def test_every_step_appears_while_the_training_goes_on(training: Training, serve: Serve, open_page: Open) -> None:
    training.wait_for("config.toml")
    overview, table = watch(open_page, serve(training.out))
    training.wait_for("rollouts/step-000001.jsonl")
    for step in (1, 2):
        wait_until(overview, f"document.querySelector('.run-header')?.textContent.includes('step {step} of {STEPS}')")
        wait_for_curve(overview, training.out, list(range(1, step + 1)))
        table.wait_for_selector(f"[data-total='{step * PER_STEP}']")
        wait_until(table, f"document.querySelector('tbody tr td').textContent.trim() === '{step}'")
        assert overview.locator(".run-header .status.live").inner_text() == "live"
        assert training.process.poll() is None
        training.go_on(step)
        if step == 1:
            training.wait_for("rollouts/step-000002.jsonl")
    training.finish()
    wait_until(overview, f"document.querySelector('.run-header').textContent.includes('step {STEPS} of {STEPS}')")
    wait_for_curve(overview, training.out, list(range(1, STEPS + 1)))
    table.wait_for_selector(f"[data-total='{STEPS * PER_STEP}']")
    wait_until(overview, "document.querySelector('.run-header .status').textContent === 'finished'")
    wait_until(table, "!document.querySelector('.status.live')")  # each page looks every two seconds
    assert_never_reloaded(overview, table)


def test_a_run_that_is_killed_turns_from_live_to_crashed(turns: Training, serve: Serve, open_page: Open) -> None:
    turns.wait_for("rollouts/step-000001.jsonl")
    overview, table = watch(open_page, serve(turns.out))
    overview.wait_for_selector(".run-header .status.live")
    wait_for_curve(overview, turns.out, [1])
    turns.go_on(1)
    wait_for_curve(overview, turns.out, [1, 2])
    turns.kill()
    wait_until(overview, "document.querySelector('.run-header .status').textContent === 'crashed'")
    table.wait_for_selector(f"[data-total='{2 * PER_STEP}']")
    assert overview.locator("[data-reason]").count() > 0
    wait_for_curve(overview, turns.out, [1, 2])  # what it did is still there
    wait_until(table, "!document.querySelector('.status.live')")
    assert_never_reloaded(overview, table)


def follow_to_the_end(training: Training, address: str, open_page: Open) -> Any:
    """From the first step; returns the page, which then shows a rollout."""
    overview, table = watch(open_page, address)
    overview.wait_for_selector(".run-header .status.live")
    wait_for_curve(overview, training.out, [1])
    table.wait_for_selector(f"[data-total='{PER_STEP}']")
    training.finish()
    wait_until(overview, "document.querySelector('.run-header .status').textContent === 'finished'")
    wait_for_curve(overview, training.out, list(range(1, STEPS + 1)))
    table.wait_for_selector(f"[data-total='{STEPS * PER_STEP}']")
    assert_never_reloaded(overview, table)
    return table


def assert_no_page_is_empty_without_a_reason(page: Any, run: Path, address: str) -> None:
    """Every view of a rollout that was trained on, by each of the colours."""
    row = first_row(run, f"step-{STEPS:06d}", trained_on=True)
    for colour in ("advantages", "logprobs", "entropies", "gaps", "versions"):
        page.goto(f"{address}{rollout_link('rollout', row, colour=colour, token='0.1')}")
        page.wait_for_selector("[data-token]")
        assert "not stored" not in page.inner_text(".colouring"), colour
    assert page.locator("[data-advantage]").count() == 1
    for name, shown in (("group", ".leaf"), ("anchors", "[data-anchor]")):
        page.goto(f"{address}{rollout_link(name, row)}")
        page.wait_for_selector(shown)
    for name, why in (("router", "was not routed"), ("thinking", "No thinking levels were compared")):
        page.goto(f"{address}{rollout_link(name, row)}")
        wait_until(page, f"document.querySelector('main .empty')?.textContent.includes({why!r})")


def test_a_run_on_a_cluster_is_followed_like_any_other(cluster: Training, serve: Serve, open_page: Open) -> None:
    cluster.wait_for("rollouts/step-000001.jsonl")
    page = follow_to_the_end(cluster, serve(cluster.out), open_page)
    assert_no_page_is_empty_without_a_reason(page, cluster.out, serve(cluster.out))


@pytest.mark.long
def test_a_run_of_two_learners_is_followed_like_any_other(learners: Training, serve: Serve, open_page: Open) -> None:
    learners.wait_for("rollouts/step-000001.jsonl")
    page = follow_to_the_end(learners, serve(learners.out), open_page)
    assert_no_page_is_empty_without_a_reason(page, learners.out, serve(learners.out))
