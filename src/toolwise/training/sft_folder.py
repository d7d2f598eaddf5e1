"""The output folder of a supervised fine-tuning run: a run folder that in the end also holds the trained model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from toolwise.config.sft import SftConfig
from toolwise.errors import ConfigError, ModelError, ToolwiseError
from toolwise.serialization.files import disk_fault
from toolwise.training import checkpoint
from toolwise.training.changes import resume_command
from toolwise.training.run_folder import RunResult, check_folder, open_run

OWN_NAMES = frozenset({".lock", "config.toml", "changes.jsonl", "metrics.jsonl", "summary.json", "data", "checkpoints"})
"""What a run writes into its folder before the trained model."""


def check_output(out: Path, config: SftConfig, *, resume: bool) -> None:
    """Raise unless a run with `config` may start, or resume, in `out`."""
    holds_run = (out / "config.toml").is_file()
    if not resume and not holds_run and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not an empty folder: choose another one for the trained model")
    check_folder(out, config, resume=resume)


def finished_sft(out: Path, steps: int) -> RunResult | None:
    """The result of the run in `out` if it has done `steps` steps and written its model, else None."""
    summary = open_run(out).saved_summary
    if summary is None or summary.get("interrupted") or summary.get("steps", 0) < steps:
        return None
    return RunResult(out, summary, f"nothing left to do: the run is at step {summary['steps']} of {steps}")


def write_model(out: Path, write: Callable[[Path], None]) -> None:
    """Write a complete model or nothing: into a folder within `out`, whose files are then moved up."""
    temporary = out / f".tmp-{os.getpid()}"
    moved: list[Path] = []
    try:
        temporary.mkdir()
        write(temporary)
        for file in sorted(temporary.iterdir()):
            file.rename(out / file.name)
            moved.append(out / file.name)
    except BaseException:
        for path in moved:
            _remove(path)
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def list_names(out: Path) -> frozenset[str] | None:
    """What is in `out` before a run starts there; None if there is no such folder."""
    return frozenset(path.name for path in out.iterdir()) if out.is_dir() else None


def disk_error(
    fault: BaseException, out: Path, *, before: frozenset[str] | None, model_written: bool = False
) -> ToolwiseError | None:
    """The error to raise if the disk refused a write, else None.

    A run with neither a checkpoint nor its trained model has nothing to continue from: the files that it wrote are
    removed. `before` (see `list_names`) was there already and stays.
    """
    if isinstance(fault, ToolwiseError) or (reason := disk_fault(fault)) is None:
        return None
    if model_written:
        return ModelError(
            f"cannot write {out}: {reason}; the trained model there is complete and can be used, but the run's "
            "summary or report is not"
        )
    if checkpoint.latest(out / "checkpoints", warnings_out=[]) is not None:
        return ModelError(f"cannot write {out}: {reason}; make room, then continue: {resume_command(out)}")
    if out.is_dir():
        for path in [path for path in out.iterdir() if path.name not in (before or ()) and _is_own(path.name)]:
            _remove(path)
    if before is None:
        with suppress(OSError):  # others have put files there
            out.rmdir()
    return ModelError(f"cannot write {out}: {reason}; partial files were removed")


def _is_own(name: str) -> bool:
    return name in OWN_NAMES or (name.startswith(".") and name.endswith(f".{os.getpid()}.tmp"))


def _remove(path: Path) -> None:
    with suppress(OSError):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
