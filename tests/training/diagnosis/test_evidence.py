"""Which rollouts a finding points to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest

from toolwise.training.diagnosis.evidence import MAX_ROLLOUTS, pages, with_rollouts
from toolwise.training.run_folder import open_run
from toolwise.types.findings import Finding
from toolwise.view.report import _finding_view
from toolwise.view.view_server import Pages


def record(name: str, **fields: Any) -> dict[str, Any]:
    text = fields.pop("says", name)
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
    return {"rollout_id": name, "task_id": name, "messages": messages, "score": 0.0, **fields}


def store(folder: Path, records: list[dict[str, Any]], step: int = 7) -> None:
    (folder / "rollouts").mkdir()
    lines = "".join(f"{json.dumps(line)}\n" for line in records)
    (folder / "rollouts" / f"step-{step:06d}.jsonl").write_text(lines)


RECORDS = [
    record("cheap", score=0.1, cost=0.0, metrics={"correct": 0.0}, steps=[{"tokens": 3}]),
    record("hacked", score=9.0, cost=1.0, metrics={"correct": 0.0}, steps=[{"tokens": 4}], says="same"),
    record("right", score=5.0, cost=5.0, metrics={"correct": 1.0}, steps=[{"tokens": 90}], says="same"),
    record("broken", score=0.2, failed_calls={"timeout": 2}, metrics={"correct": 0.0}, steps=[{"tokens": 5}]),
    record("lost", score=None, fault="server down"),
]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("reward_hacking", ["hacked", "broken", "cheap"]),
        ("length_creep", ["right", "broken", "hacked", "cheap", "lost"]),
        ("identical_outputs", ["hacked", "right"]),
        ("tool_failures", ["broken"]),
        ("budget_missed", ["right", "hacked", "cheap", "broken", "lost"]),
        ("weights_unchanged", ["broken"]),
        ("episodes_failed", ["lost"]),
        ("prompt_too_long", ["lost"]),
        ("starvation", []),
        ("score_collapse", ["cheap", "broken", "right", "hacked"]),
    ],
)
def test_the_rollouts_that_show_it_best_come_first(kind: str, expected: list[str], tmp_path: Path) -> None:
    store(tmp_path, RECORDS)
    finding = with_rollouts(Finding(kind, "warning", "", steps=(3, 7)), tmp_path)
    assert list(finding.rollouts) == expected


def test_there_are_only_a_few(tmp_path: Path) -> None:
    store(tmp_path, [record(str(index)) for index in range(20)])
    assert len(with_rollouts(Finding("score_collapse", "wrong", "", step=7), tmp_path).rollouts) == MAX_ROLLOUTS


def test_a_finding_without_stored_rollouts_stays_as_it_is(tmp_path: Path) -> None:
    finding = Finding("truncation", "warning", "", steps=(1, 2))
    assert with_rollouts(finding, tmp_path) == finding
    assert with_rollouts(Finding("one_family", "warning", ""), tmp_path).rollouts == ()
    store(tmp_path, [], step=2)
    (tmp_path / "rollouts" / "step-000002.jsonl").write_text('{"broken\n{"also": 1}\n')
    assert with_rollouts(finding, tmp_path) == finding


def test_its_links_open_the_rollouts_in_the_view(tmp_path: Path) -> None:
    name = "step-6/2/a task & its? name/0"
    store(tmp_path, [record(name)])
    finding = with_rollouts(Finding("score_collapse", "wrong", "", steps=(3, 7)), tmp_path)
    view = Pages([tmp_path])
    (rollout, found), (table, listed) = [open_link(view, link) for link in pages(finding)]
    assert (rollout, found["row"]["rollout_id"]) == ("rollout", name)
    assert (table, [row["rollout_id"] for row in listed["rows"]]) == ("rollouts", [name])


def open_link(view: Pages, link: str) -> tuple[str, Any]:
    """What the page asks the server for: `parseRoute` of route.js."""
    page, _, query = link.removeprefix("#/").partition("?")
    status, answer = view.answer(page, dict(parse_qsl(query)))
    assert status == 200, answer
    return page, answer


def test_a_finding_of_no_step_has_no_links() -> None:
    assert pages(Finding("one_family", "warning", "")) == []


def test_the_doctor_and_the_report_say_where_to_look(tmp_path: Path, cli: Any) -> None:
    store(tmp_path, [record("step-6/a")])
    evidence = {"steps": [3, 7], "rollouts": ["step-6/a"], "figures": {}}
    stored = {"kind": "replies_cut", "severity": "warning", "cause": "all", "cure": "raise", "step": 7}
    (tmp_path / "diagnosis.json").write_text(json.dumps([{**stored, "evidence": evidence}]))
    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n')
    link = "#/rollout?run=0&file=step-000007&id=step-6%2Fa"
    ended = cli("doctor", tmp_path)
    assert f"In the browser: toolwise view {tmp_path}, at\n    {link}\n" in ended.out
    [entry] = open_run(tmp_path).diagnosis
    assert link in _finding_view(entry)["evidence"]
    assert _finding_view({**entry, "evidence": {"steps": ["x"], "rollouts": [1]}})["evidence"] == "rollouts 1"
