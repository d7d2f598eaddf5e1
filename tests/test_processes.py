"""Experiments made of processes: all are made, one that fails holds nobody up, and a limit ends what is running."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import run_all


@dataclass(frozen=True)
class Job:
    name: str
    needs: str = ""


def work(job: Job, folder: Path) -> None:
    if job.name == "bad":
        raise SystemExit(3)
    if job.name == "slow":
        time.sleep(600)
    (folder / job.name).write_text("done")


def left(folder: Path, jobs: list[Job]) -> tuple[list[Job], bool]:
    """What can be begun: not done, and what it needs is."""
    missing = [job for job in jobs if not (folder / job.name).exists()]
    return [job for job in missing if not job.needs or (folder / job.needs).exists()], True


def test_what_is_done_opens_the_way_for_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    jobs = [Job("first"), Job("second", needs="first")]
    assert run_all(lambda: left(tmp_path, jobs), work, tmp_path, jobs=2, limit_s=120)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]
    assert [line.split("  ")[-1] for line in capfd.readouterr().out.splitlines()] == ["first: done", "second: done"]
    assert run_all(lambda: left(tmp_path, jobs), work, tmp_path, jobs=2, limit_s=120)  # nothing is made again
    assert capfd.readouterr().out == ""


def test_one_that_fails_is_said_and_holds_nobody_up(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    jobs = [Job("bad"), Job("never", needs="bad"), Job("good")]
    assert not run_all(lambda: left(tmp_path, jobs), work, tmp_path, jobs=1, limit_s=120)
    assert [path.name for path in tmp_path.iterdir()] == ["good"]
    assert "bad: 3" in capfd.readouterr().out


def test_the_limit_ends_what_is_running(tmp_path: Path) -> None:
    began = time.monotonic()
    assert not run_all(lambda: left(tmp_path, [Job("slow")]), work, tmp_path, jobs=1, limit_s=1)
    assert time.monotonic() - began < 60
    assert not list(tmp_path.iterdir())
