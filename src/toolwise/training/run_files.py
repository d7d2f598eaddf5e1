"""A run's folder before it is used: whose it is, its last whole checkpoint, and what a killed run left unfinished."""

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
    """Whether a run under `config` may begin, or go on, in `out`. Nothing is changed."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file: choose a folder for --out")
    if out.is_symlink() and not out.exists():
        raise ConfigError(f"{out} is a link to nowhere: choose another --out")
    config_file = out / "config.toml"
    if config_file.exists():
        if not resume:
            raise ConfigError(f"{out} already holds a run: add --resume to go on with it, or choose another --out")
        check_same_run(config, config_file)
    elif checkpoint.latest(out / "checkpoints", warnings_out=[]) is not None:
        raise CheckpointError(f"{out} has checkpoints and no config.toml to tell whose: choose another --out")
    elif resume:
        raise ConfigError(f"{out} holds no run to resume (no config.toml): leave --resume out to begin one there")


def find_checkpoint(folder: Path) -> checkpoint.Checkpoint | None:
    """The last whole one. Damaged ones are passed over, but never all of them: that would begin the run anew."""
    damaged: list[str] = []
    found = checkpoint.latest(folder, warnings_out=damaged)
    if found is None and damaged:
        raise CheckpointError(f"cannot resume, all checkpoints are damaged: {damaged[0]}; or remove {folder}")
    for warning in damaged:
        log.warning("%s", warning)
    return found


def delete_rollouts_after(folder: Path, step: int) -> None:
    for path in folder.iterdir() if folder.is_dir() else ():
        found = re.fullmatch(r"(?:step|eval)-(\d{6,})\.(?:jsonl|safetensors)", path.name)
        if found is not None and int(found.group(1)) > step:
            path.unlink()


def remove_partial_files(out: Path) -> None:
    """Remove what a killed run was in the middle of writing."""
    beside = (
        ".config.toml.*.tmp",
        ".*.json.*.tmp",
        "metrics.jsonl.tmp",
        "changes.jsonl.tmp",
        "report.*.tmp",
        "rollouts/.*.tmp",
        "code/.*.tmp",
        "data/.*.tmp",
    )
    for path in [path for pattern in beside for path in out.glob(pattern)]:
        path.unlink()
    for path in out.glob("checkpoints/step-*.tmp-*"):
        shutil.rmtree(path)
