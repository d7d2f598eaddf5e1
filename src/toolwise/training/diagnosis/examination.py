"""Examines a run's folder, of any age and in any state, as the doctor would have done during the run."""

from __future__ import annotations

import os
import socket
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from toolwise.messages import as_messages
from toolwise.training.changes import resume_command
from toolwise.training.checkpoint.lock import LOCK
from toolwise.training.diagnosis.doctor import CHECKS, RunDoctor
from toolwise.training.diagnosis.history import EARLY, WINDOW, History, Row
from toolwise.training.diagnosis.monitor import finding_from_json
from toolwise.training.metrics import most_common_share, written_text
from toolwise.training.records import read_records
from toolwise.training.rollout_paths import rollout_file
from toolwise.training.run_folder import RunFolder, open_run, require_run
from toolwise.types.findings import Finding

State = Literal["finished", "running", "interrupted", "stopped", "crashed"]
QUIET_S = 600.0
"""A run on another machine that has written nothing for so long has probably ended."""


@dataclass(frozen=True, slots=True)
class Examination:
    """What the doctor says about a run folder."""

    run_folder: Path
    state: State
    step: int
    """Training steps done."""
    findings: list[Finding]


def examine_run(run_dir: str | os.PathLike[str]) -> Examination:
    """Read a run folder and apply all checks. Changes nothing in it."""
    run = open_run(run_dir)
    require_run(run)
    doctor = RunDoctor(History(stored_settings(run)))
    doctor.replay(complete_rows(run))
    others = [finding_from_json(entry) for entry in run.diagnosis if entry.get("kind") not in CHECKS]
    state = run_state(run)
    findings = doctor.findings(others, run.path)
    step = max((int(row.get("step") or 0) for row in run.metrics), default=0)
    if state == "crashed":
        findings.append(_crashed(run, step))
    return Examination(run.path, state, step, findings)


def run_state(run: RunFolder) -> State:
    """Whether a process still trains the run, or how it ended."""
    if _in_use(run.path):
        return "running"
    summary = run.saved_summary
    if summary is None:
        return "crashed"
    if run.finished:
        return "finished"
    return "interrupted" if summary.get("interrupted") else "stopped"


def stored_settings(run: RunFolder) -> Mapping[str, Any]:
    """The settings that the run was started with, without defaults; empty if they cannot be read."""
    try:
        return tomllib.loads(run.config_text or "")
    except (ValueError, RecursionError):
        return {}


def complete_rows(run: RunFolder) -> Iterator[Row]:
    """The run's metrics. The share of identical outputs, which older runs lack, is counted in the stored rollouts of
    the first and the latest steps, which are the ones that are compared."""
    steps = [row for row in run.metrics if "rollouts" in row]
    wanted = [*steps[:EARLY], *steps[-WINDOW:]]
    for row in run.metrics:
        if "outputs/most_common" in row or not any(row is other for other in wanted):
            yield row
            continue
        path = rollout_file(run.path / "rollouts", f"step-{int(row.get('step') or 0):06d}")
        texts = [written_text(as_messages(record.messages)) for record in read_records(path)] if path else []
        yield {**row, "outputs/most_common": most_common_share(texts)} if texts else row


def _in_use(folder: Path) -> bool:
    """Whether the process that the lock file names still runs. The lock itself is left alone: to try it, even for a
    moment, could stop a run that is about to start."""
    file = folder / LOCK
    if not file.is_file():  # or a pipe, which would block
        return False
    try:
        process, _, host = file.read_text(encoding="utf-8").strip().partition(" ")
        if host != socket.gethostname():
            return time.time() - (folder / "metrics.jsonl").stat().st_mtime < QUIET_S
        os.kill(int(process), 0)
    except PermissionError:  # another user's process
        return True
    except (OSError, ValueError, OverflowError):
        return False
    return True


def _crashed(run: RunFolder, step: int) -> Finding:
    return Finding(
        "crashed",
        "wrong",
        f"The run ended without a summary after step {step}: its process was killed, or the machine went down",
        cure=f"Look at the end of its output, and at the memory of the machine; then continue it: "
        f"{resume_command(run.path)}",
        step=step,
    )
