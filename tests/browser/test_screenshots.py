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
    "thinking": ("[data-level]", "sample"),
}


def chosen_row(run: Path, *, newest: bool) -> dict[str, Any]:
    """A rollout of several steps that was trained on, in a group whose scores differ."""
    store = RunStore(run)
    files = [file["file"] for file in store.files() if file["phase"] == "train"]
    for file in files[::-1] if newest else files:
        for row in store.of_file(file).to_pylist():
            scores = {other["score"] for other in store.group(file, row["group_id"])}
            if row["trained_on"] and row["steps"] > 1 and len(scores) > 1 and row["correct"]:
                return dict(row)
    raise AssertionError("no rollout is worth a picture")


@pytest.mark.parametrize("view", VIEWS)
def test_a_picture_of_each_view(
    view: str,
    request: pytest.FixtureRequest,
    sample: Path,
    serve: Callable[..., str],
    open_page: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """SCREENSHOT_RUN: a run with a router to show in place of the short one, which has none."""
    selector, source = VIEWS[view]
    shown = os.environ.get("SCREENSHOT_RUN")
    if source == "sample" or (source == "routed" and not shown):
        run = sample
    else:
        run = Path(shown) if shown else request.getfixturevalue("trained")
    routes = {
        "overview": "#/overview",
        "rollouts": "#/rollouts?sort=advantage&desc=true&scatter=1&x=tokens&y=score&phase=train",
        "compare": "#/compare",
    }
    row = chosen_row(run, newest=view == "router")
    route = routes.get(view) or rollout_link(view, row, token="0.5")
    page = open_page(serve(run), route, dark=view == "anchors")
    page.wait_for_selector(selector)
    wait_until_settled(page)
    folder = Path(os.environ.get("SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / f"view-{view}.png"
    page.screenshot(path=picture)
    assert picture.stat().st_size > 10_000
