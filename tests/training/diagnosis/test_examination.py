"""`toolwise doctor RUN` on folders in every state: finished, running, interrupted, crashed, old, and not a run."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import doctor_runs
import pytest

from toolwise.errors import CheckpointError
from toolwise.training.diagnosis.examination import examine_run

Cli = Callable[..., Any]


def make_run(folder: Path, name: str, summary: dict[str, Any] | None) -> Path:
    """A folder with the metrics of a recorded run."""
    import gzip

    import tomli_w

    folder.mkdir()
    text = gzip.decompress((doctor_runs.FIXTURES / f"{name}.jsonl.gz").read_bytes())
    (folder / "metrics.jsonl").write_bytes(text)
    (folder / "config.toml").write_text(tomli_w.dumps(doctor_runs.settings_of(name)))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


FINISHED = {"steps": 12, "total_steps": 12, "interrupted": False, "diagnosis": []}


def lock(folder: Path, process: int, host: str) -> None:
    (folder / ".lock").write_text(f"{process} {host}\n")


def test_a_finished_healthy_run_has_nothing(tmp_path: Path, cli: Cli) -> None:
    run = make_run(tmp_path / "run", "grpo", {**FINISHED, "steps": 24, "total_steps": 24})
    ended = cli("doctor", run)
    assert (ended.status, ended.out) == (0, f"{run}: finished, 24 steps\nnothing found\n")


def test_a_sick_one_is_explained_and_the_status_says_so(tmp_path: Path, cli: Cli) -> None:
    run = make_run(tmp_path / "run", "truncated", FINISHED)
    ended = cli("doctor", run)
    assert ended.status == 1
    assert "WARNING truncation (steps 1 to 5)" in ended.out
    assert "What to do: Raise rollout.max_new_tokens (now 22)" in ended.out


def test_json_is_plain_data_for_other_programs(tmp_path: Path, cli: Cli) -> None:
    ended = cli("doctor", make_run(tmp_path / "run", "truncated", FINISHED), "--json")
    found = json.loads(ended.out)
    assert (ended.status, found["state"], found["step"]) == (1, "finished", 12)
    [finding] = found["findings"]
    assert set(finding) == {"kind", "severity", "cause", "cure", "settings", "step", "evidence", "pages"}
    assert finding["pages"] == ["#/rollouts?run=0&phase=train&step_min=1&step_max=5"]
    assert (finding["kind"], finding["severity"], finding["step"]) == ("truncation", "warning", 5)
    assert finding["evidence"]["steps"] == [1, 5]
    assert finding["evidence"]["figures"]["cut"] > 0.2


def test_what_the_run_stored_is_told_too_and_not_twice(tmp_path: Path) -> None:
    stored = [{"kind": "replies_cut", "cause": "all", "cure": "raise", "step": 3}, {"kind": "truncation", "step": 5}]
    run = make_run(tmp_path / "run", "truncated", {**FINISHED, "diagnosis": stored})
    assert [finding.name for finding in examine_run(run).findings] == ["replies_cut"]


@pytest.mark.parametrize(
    ("summary", "holder", "state"),
    [
        (None, (os.getpid(), socket.gethostname()), "running"),
        (None, (os.getpid(), "elsewhere"), "running"),
        (None, (2**22 + 1, socket.gethostname()), "crashed"),
        (None, None, "crashed"),
        ({**FINISHED, "interrupted": True, "steps": 3}, None, "interrupted"),
        ({**FINISHED, "steps": 3, "stopped": "too many faults"}, None, "stopped"),
    ],
)
def test_the_state_of_a_run_is_told(
    summary: dict[str, Any] | None, holder: tuple[int, str] | None, state: str, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", "grpo", summary)
    if holder is not None:
        lock(run, *holder)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    examination = examine_run(run)
    assert examination.state == state
    assert [finding.name for finding in examination.findings] == (["crashed"] if state == "crashed" else [])
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_a_run_of_another_machine_that_has_long_been_silent_has_crashed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "grpo", None)
    lock(run, 1, "elsewhere")
    os.utime(run / "metrics.jsonl", (0, 0))
    assert examine_run(run).state == "crashed"


def test_a_last_line_that_was_cut_off_by_a_crash_is_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "grpo", None)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 25, "rollou')
    assert examine_run(run).step == 24


def test_a_run_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    shutil.unpack_archive(doctor_runs.FIXTURES.parent / "frozen_run.tar.gz", tmp_path)
    examination = examine_run(tmp_path / "run")
    assert (examination.state, examination.step, examination.findings) == ("finished", 2, [])


def test_identical_outputs_are_counted_in_the_rollouts_of_runs_that_did_not_count_them(tmp_path: Path) -> None:
    rows = [{"step": step, "rollouts": 4.0, "score/mean": 0.2} for step in range(1, 15)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "rollouts").mkdir()
    for step in range(1, 15):
        texts = [f"{index}" if step < 8 else "same" for index in range(4)]
        lines = [
            {"rollout_id": f"{step}-{i}", "messages": [{"role": "assistant", "content": t}]}
            for i, t in enumerate(texts)
        ]
        path = tmp_path / "rollouts" / f"step-{step:06d}.jsonl"
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    names = [finding.name for finding in examine_run(tmp_path).findings]
    assert "identical_outputs" in names


def test_a_folder_that_is_no_run_is_an_error(tmp_path: Path, cli: Cli) -> None:
    with pytest.raises(CheckpointError, match="not a run folder"):
        examine_run(tmp_path)
    ended = cli("doctor", tmp_path / "missing")
    assert ended.status == 2
    assert "no such run folder" in ended.err
