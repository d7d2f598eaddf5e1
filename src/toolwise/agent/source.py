"""Finds the run and the checkpoint that a path refers to: the folder of a run, or one of its checkpoints."""

from __future__ import annotations

from pathlib import Path

from toolwise.errors import CheckpointError, ConfigError
from toolwise.training import checkpoint
from toolwise.training.checkpoint import Checkpoint


def find_run(source: Path, problem: str) -> Path:
    """The folder of the run; raises "SOURCE `problem`" if there is none."""
    run = source.resolve().parent.parent if _is_checkpoint(source) else source
    if not (run / "config.toml").is_file():
        raise CheckpointError(f"{run} {problem}")
    return run


def find_checkpoint(
    source: Path, *, best: str = "", command: str = "give", hint: str = "wait for the first one"
) -> Checkpoint:
    """The checkpoint itself; for a run its latest, or the best by the validation metric `best` ("-cost": the lowest).

    `command` and `hint` say in an error what to do with a single checkpoint, or without any.
    """
    if _is_checkpoint(source):
        if best:
            run = source.resolve().parent.parent
            raise ConfigError(
                f"{source} is a single checkpoint: give its run, {run}, to choose one of its checkpoints with --best"
            )
        return checkpoint.load(source)
    folder, damaged = source / "checkpoints", list[str]()
    if best:
        chosen = checkpoint.best(folder, best, warnings_out=damaged)
    else:
        chosen = checkpoint.latest(folder, warnings_out=damaged)
    if damaged:  # do not silently use an older one
        raise CheckpointError(f"{damaged[0].removeprefix('passed over: ')}: {command} RUN/checkpoints/step-…")
    if chosen is None and best:
        latest = checkpoint.latest(folder, warnings_out=[])
        names = ", ".join(sorted(latest.figures)) if latest is not None else ""
        available = f"available: {names}" if names else "leave --best out to export the latest"
        raise CheckpointError(f"no checkpoint in {folder} was validated for {best.removeprefix('-')!r}: {available}")
    if chosen is None:
        raise CheckpointError(f"{source} has no complete checkpoint yet: {hint}")
    return chosen


def _is_checkpoint(source: Path) -> bool:
    return (source / checkpoint.MANIFEST).is_file()
