"""Two runs side by side, and all rollouts of a task."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from browser_cases import wait_until
from view_runs import sample_run

from toolwise.view.rollout_store import RunStore

Open = Callable[..., Any]
Serve = Callable[..., str]


def rescore(run: Path, file: str, changes: dict[str, tuple[float, float]]) -> None:
    """Give the rollouts of these tasks another score and cost."""
    path = run / "rollouts" / f"{file}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if row["task_id"] in changes:
            row["score"], row["cost"] = changes[row["task_id"]]
            row["metrics"]["correct"] = row["score"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "rollouts" / f"{file}.index.parquet").unlink()


def test_two_runs_are_compared(tmp_path: Path, serve: Serve, open_page: Open) -> None:
    runs = [sample_run(tmp_path / name, steps=1) for name in ("first", "second")]
    rescore(runs[0], "eval-000001", {"task-3": (1.0, 2.0), "task-5": (0.0, 3.0)})
    rescore(runs[1], "eval-000001", {"task-1": (1.0, 1.0), "task-3": (0.0, 2.0), "task-5": (0.0, 1.0)})
    route = "#/compare?run=0&file=eval-000001&other_run=1&other_file=eval-000001"
    page = open_page(serve(*runs), route)
    page.wait_for_selector(".conversation")
    tasks = "[...document.querySelectorAll('[data-task]')].map(e => [e.dataset.task, e.dataset.result])"
    found = dict(page.evaluate(tasks))
    assert {name: found.pop(name) for name in ("task-1", "task-3", "task-5")} == {
        "task-1": "learned",
        "task-3": "lost",
        "task-5": "cheaper",
    }
    assert set(found.values()) == {"same"}
    counts = page.evaluate(
        "[...document.querySelectorAll('[data-outcome]')].map(e => [e.dataset.outcome, e.innerText])"
    )
    assert {name: int(text.split()[0]) for name, text in counts} == {"learned": 1, "lost": 1, "cheaper": 1, "same": 5}
    page.locator("[data-task='task-1'] button").click()
    wait_until(page, "location.hash.includes('task=task-1')")
    page.wait_for_selector(".sides .conversation >> nth=1")
    links = page.locator(".sides h2 a").evaluate_all("all => all.map(e => e.hash)")
    assert ["run=0" in links[0], "run=1" in links[1]] == [True, True]
    assert "score 1, cost 1" in page.locator(".sides h2").nth(1).inner_text()


def test_every_rollout_of_a_task_can_be_put_beside_the_others(sample: Path, serve: Serve, open_page: Open) -> None:
    group = RunStore(sample).group("step-000001", "step-1/1")
    route = "#/compare?file=step-000001&other_file=step-000003&task=task-1"
    page = open_page(serve(sample), route)
    page.wait_for_selector(".compared [data-choice]")
    left = page.locator(".compared").first
    choices = left.locator("[data-choice]").evaluate_all("all => all.map(e => e.dataset.choice)")
    assert choices == [one["rollout_id"] for one in group]
    last = group[-1]["rollout_id"]
    left.locator(f"[data-choice='{last}']").click()
    wait_until(page, f"document.querySelector('.compared h2 a')?.hash.includes({last.split('/')[-1]!r})")
    page.locator(".compared").nth(1).locator("[data-choice]").nth(2).click()
    wait_until(page, "document.querySelectorAll('.compared h2 a')[1]?.hash.endsWith('1%2F2')")
    assert last.replace("/", "%2F") in page.locator(".compared h2 a").first.get_attribute("href")
    assert "left=" in page.evaluate("location.hash")  # and a link shows the same again
