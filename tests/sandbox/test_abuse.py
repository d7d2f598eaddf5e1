"""The abuse suite: hostile rewards, run as the current user and, if that is root, again as an unprivileged user."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import abuse_cases as cases
import pytest
from unprivileged import NOBODY, python_for_anybody, readable_copy

linux = pytest.mark.skipif(sys.platform != "linux", reason="the standard tier is Linux's")


@pytest.fixture(scope="module")
def ground() -> Iterator[Any]:
    with tempfile.TemporaryDirectory(prefix="toolwise-abuse-") as folder, cases.ground_in(Path(folder)) as ground:
        if not ground.sandbox.report().complete:
            pytest.skip(ground.sandbox.describe())
        yield ground


def _check(case: Any, outcome: Any) -> None:
    assert outcome["kind"] in case.kind.split(), outcome
    assert outcome["left_behind"] == [], outcome
    assert outcome["next_score"] == 0.25, outcome
    assert outcome["seconds"] <= cases.TIMEOUT_S + cases.GRACE_S, outcome
    assert outcome["disk_mb"] <= outcome["disk_limit_mb"], outcome
    if case.score is not None:
        assert outcome["score"] == case.score, outcome
    if case.replaced is not None:
        assert outcome["replaced"] == case.replaced, outcome
    if outcome["kind"] != "ok":
        assert outcome["score"] is None, outcome
        assert outcome["message"], outcome


def sample(every: int, first: int = 0) -> list[Any]:
    """The cases about files; most are `long` tests."""
    chosen = cases.FILE_CASES[first::every]
    return [
        pytest.param(case, marks=() if case in chosen else pytest.mark.long, id=case.name) for case in cases.FILE_CASES
    ]


OTHERS = [
    pytest.param(case, marks=pytest.mark.long if number % 2 else (), id=case.name)
    for number, case in enumerate(case for case in cases.CASES if case not in cases.FILE_CASES)
]
"""Every other case is a `long` test."""


@linux
@pytest.mark.parametrize("case", [*OTHERS, *sample(3)])
def test_the_parent_survives(case: Any, ground: Any) -> None:
    _check(case, cases.asdict(ground.run(case)))


@pytest.fixture(scope="module")
def measured() -> Iterator[Any]:
    """Simulates a machine where a worker cannot have its own file system."""
    with (
        tempfile.TemporaryDirectory(prefix="toolwise-abuse-") as folder,
        cases.ground_in(Path(folder), own_disk=False) as ground,
    ):
        yield ground


@linux
@pytest.mark.parametrize("case", sample(8, 1))
def test_the_parent_survives_where_disks_are_measured(case: Any, measured: Any) -> None:
    _check(case, cases.asdict(measured.run(case)))


@pytest.fixture(scope="module", params=[True, False])
def basic(request: pytest.FixtureRequest) -> Iterator[Any]:
    with (
        tempfile.TemporaryDirectory(prefix="toolwise-abuse-") as folder,
        cases.ground_in(Path(folder), "basic", own_disk=request.param) as ground,
    ):
        yield ground


UNSTOPPED = ("there_and_full", "reserved", "memory_files", "on_their_way", "left_pipe", "immutable")
"""What only a seccomp filter can stop."""


@linux
@pytest.mark.parametrize("case", [p for p in sample(16, 2) if not any(word in p.values[0].name for word in UNSTOPPED)])
def test_the_parent_survives_in_the_basic_tier(case: Any, basic: Any) -> None:
    _check(case, cases.asdict(basic.run(case)))


@linux
@pytest.mark.long
@pytest.mark.parametrize("case", cases.RACES, ids=lambda case: case.name)
def test_the_parent_survives_races(case: Any, measured: Any, ground: Any) -> None:
    for place in (measured, measured, measured, ground):
        _check(case, cases.asdict(place.run(case)))


def _run_as_nobody(*arguments: str) -> dict[str, Any]:
    """The outcomes of the cases run by an unprivileged user."""
    if sys.platform != "linux" or os.getuid() != 0:
        pytest.skip("only root can become another user; the cases above ran as an unprivileged one")
    python = python_for_anybody()
    if python is None:
        pytest.skip("there is no Python that another user may run")
    with tempfile.TemporaryDirectory(prefix="toolwise-nobody-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        environment = readable_copy(folder)
        ground = folder / "ground"
        ground.mkdir()
        os.chown(ground, NOBODY, NOBODY)
        done = subprocess.run(
            [python, str(folder / "run.py"), str(ground), *arguments],
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            env=environment,
            cwd=ground,
            capture_output=True,
            text=True,
            check=False,
            timeout=1200,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert {line["uid"] for line in lines} == {NOBODY}
        return {line["name"]: line["outcome"] for line in lines}


@pytest.fixture(scope="module")
def unprivileged() -> dict[str, Any]:
    return _run_as_nobody()


@linux
@pytest.mark.parametrize("case", cases.WHERE_PRIVILEGES_MATTER, ids=lambda case: case.name)
def test_the_parent_survives_without_privileges(case: Any, unprivileged: dict[str, Any]) -> None:
    _check(case, unprivileged[case.name])


@linux
@pytest.mark.long
@pytest.mark.parametrize("own_disk", ["True", "False"])
def test_files_are_kept_within_limits_without_privileges(own_disk: str) -> None:
    for name, outcome in _run_as_nobody("files", "standard", own_disk).items():
        _check(cases.BY_NAME[name], outcome)


@linux
@pytest.mark.long
def test_the_parent_survives_everything_without_privileges() -> None:
    outcomes = _run_as_nobody("all")
    assert set(outcomes) == set(cases.BY_NAME)
    for name, outcome in outcomes.items():
        _check(cases.BY_NAME[name], outcome)


def test_there_are_enough_cases() -> None:
    assert len(cases.CASES) >= 280
    assert len(cases.FILE_CASES) >= 90
    assert len(cases.BY_NAME) == len(cases.CASES)
