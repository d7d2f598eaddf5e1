"""The doctor on recorded runs, healthy and ill, on hand-made rows, and in a run of its own."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import doctor_runs
import pytest

from toolwise.training.diagnosis.doctor import CHECKS, HEALTHY_STEPS, RunDoctor
from toolwise.training.diagnosis.examination import examine_run
from toolwise.training.diagnosis.history import History
from toolwise.types.findings import Finding

Cli = Callable[..., Any]
HEALTHY = [name for name, case in doctor_runs.CASES.items() if not case.found]
ILL = [name for name in doctor_runs.CASES if name not in HEALTHY]


def examine(name: str, before: int | None = None) -> list[Finding]:
    """What the doctor says about a recorded run, up to a step."""
    text = gzip.decompress((doctor_runs.FIXTURES / f"{name}.jsonl.gz").read_bytes()).decode()
    rows = [json.loads(line) for line in text.splitlines()]
    doctor = RunDoctor(History(doctor_runs.settings_of(name)))
    doctor.replay(row for row in rows if before is None or row["step"] <= before)
    return doctor.findings(())


def said_during(name: str) -> set[str]:
    """All kinds that were ever found, also if they were withdrawn later."""
    return {finding.name for step in range(1, 61) for finding in examine(name, step)}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_no_finding_at_any_step(name: str) -> None:
    assert said_during(name) == set()


@pytest.mark.parametrize("name", ILL)
def test_a_planted_disease_is_found_with_its_cure(name: str) -> None:
    case, findings = doctor_runs.CASES[name], examine(name)
    kinds = {finding.name for finding in findings}
    assert set(case.found) <= kinds
    assert kinds <= {*case.found, *case.also}
    assert any(case.setting in finding.settings for finding in findings if finding.name in case.found)


def delayed(rows: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """Each validation behind the training steps that went on meanwhile, as asynchronous training logs them."""
    last = rows[-1]["step"]
    late = {id(row): min(row["step"] + steps, last) + 0.5 for row in rows if "eval/score" in row and row["step"]}
    return sorted(rows, key=lambda row: late.get(id(row), row["step"]))


@pytest.mark.parametrize("name", doctor_runs.CASES)
def test_validations_that_come_late_change_no_finding(name: str) -> None:
    text = gzip.decompress((doctor_runs.FIXTURES / f"{name}.jsonl.gz").read_bytes()).decode()
    rows = [json.loads(line) for line in text.splitlines()]
    late = delayed(rows, 2)
    assert (late != rows) == any("eval/score" in row and 0 < row["step"] < rows[-1]["step"] for row in rows)
    doctor = RunDoctor(History(doctor_runs.settings_of(name)))
    doctor.replay(late)
    assert {finding.name for finding in doctor.findings(())} == {finding.name for finding in examine(name)}


def test_every_check_has_a_recorded_run_that_shows_it() -> None:
    assert {kind for case in doctor_runs.CASES.values() for kind in case.found} == set(CHECKS)


def rows(cut: Callable[[int], float], steps: int) -> list[dict[str, float]]:
    return [{"step": step, "rollouts": 32.0, "outputs/cut": cut(step)} for step in range(1, steps + 1)]


def test_a_state_that_has_ended_is_withdrawn_once_it_has_not_been_seen_for_a_while() -> None:
    doctor = RunDoctor(History())
    changes = [doctor.add(row) for row in rows(lambda step: 0.5 if step <= 8 else 0.0, 40)]
    found = [index + 1 for index, change in enumerate(changes) if change.found]
    withdrawn = [index + 1 for index, change in enumerate(changes) if change.withdrawn]
    assert found == [5]
    assert withdrawn == [12 + HEALTHY_STEPS - 1]  # the mean of 5 steps is below the threshold from step 12
    assert doctor.findings(()) == []


def test_a_finding_that_repeats_one_of_the_first_steps_is_not_shown() -> None:
    doctor, first = RunDoctor(History()), Finding("replies_cut", "warning", "all were cut")
    changes = [doctor.add(row, others=[first]) for row in rows(lambda step: 1.0, 6)]
    assert not any(change.found for change in changes)
    assert doctor.findings([first]) == [first]


@pytest.mark.long
@pytest.mark.parametrize("name", doctor_runs.CASES)
def test_the_run_says_so_while_it_trains_and_afterwards(name: str, tmp_path: Path) -> None:
    run, case = doctor_runs.train_case(name, tmp_path / name), doctor_runs.CASES[name]
    stored = json.loads((run / "summary.json").read_bytes())["diagnosis"]
    kinds = {entry["kind"] for entry in stored}
    assert set(case.found) & set(CHECKS) <= kinds
    assert kinds <= {*case.found, *case.also, *case.first}
    assert {finding.name for finding in examine_run(run).findings} == kinds
    for entry in stored:
        if entry["kind"] in CHECKS and entry["kind"] != "starvation":
            assert entry["evidence"]["rollouts"], entry
