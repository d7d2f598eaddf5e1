"""Which rollouts a finding points to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toolwise.training.diagnosis.evidence import MAX_ROLLOUTS, with_rollouts
from toolwise.types.findings import Finding


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
]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("reward_hacking", ["hacked", "broken", "cheap"]),
        ("length_creep", ["right", "broken", "hacked", "cheap"]),
        ("identical_outputs", ["hacked", "right"]),
        ("tool_failures", ["broken"]),
        ("budget_missed", ["right", "hacked", "cheap", "broken"]),
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
