"""A picture of each view, for docs/view.md: `make screenshots` keeps them, else they are thrown away."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browser_cases import rollout_link, wait_until_settled

from toolwise.view.rollout_store import RunStore

VIEWS = {
    "overview": (".u-wrap", "small-world"),
    "rollouts": ("tbody tr", "small-world"),
    "rollout": (".token-detail", "small-world"),
    "group": (".leaf", "small-world"),
    "anchors": ("[data-anchor]", "small-world"),
    "compare": (".conversation", "small-world"),
    "router": ("[data-route]", "routed"),
    "thinking": ("[data-level]", "thinking"),
}


RUNS = [Path(run) for run in os.environ.get("SCREENSHOT_RUN", "").split(os.pathsep) if run]
"""Runs to show in place of the short one, which has no router and no thinking levels."""


def chosen_row(run: Path, *, newest: bool, thinking: bool) -> dict[str, Any]:
    """A rollout of several steps that was trained on, in a group whose scores differ; for `thinking` one whose
    levels were compared at two steps, all four at one of them."""
    store = RunStore(run)
    files = [file["file"] for file in store.files() if file["phase"] == "train"]
    for file in files[::-1] if newest else files:
        for row in store.of_file(file).to_pylist():
            scores = {other["score"] for other in store.group(file, row["group_id"])}
            enough = has_all_levels(store, row) if thinking else row["steps"] > 1
            if row["trained_on"] and enough and len(scores) > 1 and row["correct"]:
                return dict(row)
    raise AssertionError("no rollout is worth a picture")


def has_all_levels(store: RunStore, row: dict[str, Any]) -> bool:
    """Whether levels were compared at two steps, all of them at one where a thought was used."""
    steps = store.record(row).thinking if row["thinking"] else []
    return len(steps) > 1 and any(len(step["levels"]) == 4 and step["level"] > 1 for step in steps)


def run_for(source: str, request: pytest.FixtureRequest) -> Path:
    """One of RUNS; else the short training, or made-up rollouts for what it does not have."""
    fitting = [run for run in RUNS if any(RunStore(run).table["thinking"].to_pylist()) == (source == "thinking")]
    if fitting:
        return fitting[0]
    return Path(request.getfixturevalue("trained" if source == "small-world" else "sample"))


@pytest.mark.parametrize("view", VIEWS)
def test_a_picture_of_each_view(
    view: str,
    request: pytest.FixtureRequest,
    serve: Callable[..., str],
    open_page: Callable[..., Any],
    tmp_path: Path,
) -> None:
    selector, source = VIEWS[view]
    run = run_for(source, request)
    routes = {
        "overview": "#/overview",
        "rollouts": "#/rollouts?sort=advantage&desc=true&scatter=1&x=tokens&y=score&phase=train",
        "compare": "#/compare",
    }
    row = chosen_row(run, newest=view == "router", thinking=view == "thinking")
    route = routes.get(view) or rollout_link(view, row, token="0.5")
    page = open_page(serve(run), route, dark=view == "anchors")
    page.wait_for_selector(selector)
    page.evaluate("document.documentElement.style.scrollbarGutter = 'auto'")  # a headless browser shows no scrollbar
    wait_until_settled(page)
    folder = Path(os.environ.get("SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / f"view-{view}.png"
    page.screenshot(path=picture)
    assert picture.stat().st_size > 10_000
