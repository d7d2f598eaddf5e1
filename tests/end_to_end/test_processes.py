"""Experiments made of processes: all are made, one that fails holds nobody up, and a limit ends what is running."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import processes
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
        (folder / "begun").write_text("")
        time.sleep(600)
    if job.name != "empty":
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


def test_one_that_leaves_nothing_behind_is_not_made_for_ever(tmp_path: Path) -> None:
    assert not run_all(lambda: left(tmp_path, [Job("empty")]), work, tmp_path, jobs=1, limit_s=120)


def test_the_limit_ends_what_is_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time stands still until the job has begun, and then it is over."""
    clock = SimpleNamespace(monotonic=lambda: 9.0 if (tmp_path / "begun").exists() else 0.0, sleep=time.sleep)
    monkeypatch.setattr(processes, "time", clock)
    before = time.monotonic()
    assert not run_all(lambda: left(tmp_path, [Job("slow")]), work, tmp_path, jobs=1, limit_s=5)
    assert [path.name for path in tmp_path.iterdir()] == ["begun"]
    assert time.monotonic() - before < 300  # it was not waited for
    assert not multiprocessing.active_children()
