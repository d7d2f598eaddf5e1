"""Checks and cleans up a run folder before use: which run it belongs to, its last valid checkpoint, partial files."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

from toolwise.config.schema import RunConfig
from toolwise.errors import CheckpointError, ConfigError
from toolwise.training import checkpoint
from toolwise.training.changes import check_same_run

log = logging.getLogger("toolwise.training.trainer")


def check_folder(out: Path, config: RunConfig, *, resume: bool) -> None:
    """Raise unless a run with `config` may start, or resume, in `out`. Changes nothing."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file: choose a folder for --out")
    if out.is_symlink() and not out.exists():
        raise ConfigError(f"{out} is a broken link: choose another --out")
    config_file = out / "config.toml"
    if config_file.exists():
        if not resume:
            raise ConfigError(f"{out} already holds a run: add --resume to continue it, or choose another --out")
        check_same_run(config, config_file)
    elif checkpoint.latest(out / "checkpoints", warnings_out=[]) is not None:
        raise CheckpointError(f"{out} has checkpoints but no config.toml: choose another --out")
    elif resume:
        raise ConfigError(f"{out} holds no run to resume (no config.toml): omit --resume to start one there")


def find_checkpoint(folder: Path) -> checkpoint.Checkpoint | None:
    """The last valid checkpoint. Damaged ones are skipped, unless all are: that would restart the run from scratch."""
    damaged: list[str] = []
    newest = checkpoint.latest(folder, warnings_out=damaged)
    if newest is None and damaged:
        raise CheckpointError(f"cannot resume, all checkpoints are damaged: {damaged[0]}; or remove {folder}")
    for warning in damaged:
        log.warning("%s", warning)
    return newest


def delete_rollouts_after(folder: Path, step: int) -> None:
    for path in folder.iterdir() if folder.is_dir() else ():
        match = re.fullmatch(r"(?:step|eval)-(\d{6,})\.(?:jsonl|safetensors)", path.name)
        if match is not None and int(match.group(1)) > step:
            path.unlink()


def remove_partial_files(out: Path) -> None:
    """Remove files that a killed run left half-written."""
    patterns = (
        ".*.tmp",
        "metrics.jsonl.tmp",  # these names are from earlier versions
        "changes.jsonl.tmp",
        "report.*.tmp",
        "rollouts/.*.tmp",
        "code/.*.tmp",
        "data/.*.tmp",
    )
    for path in [path for pattern in patterns for path in out.glob(pattern)]:
        path.unlink()
    for path in out.glob("checkpoints/step-*.tmp-*"):
        shutil.rmtree(path)
