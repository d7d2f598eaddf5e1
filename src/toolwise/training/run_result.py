"""The result of a run, also of one that had already finished."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolwise.config.schema import RunConfig
from toolwise.serialization.files import checkpoint_folders, step_of
from toolwise.training import checkpoint
from toolwise.training.run_folder import open_run


@dataclass(frozen=True, slots=True)
class RunResult:
    """Where a run wrote its files, and its summary."""

    out: Path
    summary: dict[str, Any]
    note: str = ""
    """Set if a resumed run had nothing left to do and changed nothing."""


def finished_result(out: Path, config: RunConfig) -> RunResult | None:
    """The result of the run in `out` if it has reached `trainer.total_steps` and written its summary, else None."""
    total = config.trainer.total_steps
    if max(map(step_of, checkpoint_folders(out / "checkpoints")), default=-1) < total:
        return None  # decided without reading a checkpoint
    newest = checkpoint.latest(out / "checkpoints", warnings_out=[])
    summary = open_run(out).saved_summary
    if newest is None or newest.step < total or (newest.step == total and summary is None):
        return None
    empty_summary = {"before": None, "after": None, "steps": newest.step, "total_steps": total, "interrupted": False}
    return RunResult(out, summary or empty_summary, f"nothing left to do: the run is at step {newest.step} of {total}")
