"""Writes checkpoints to a temporary folder, syncs, seals and renames it, and only then removes old checkpoints."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from toolwise.errors import CheckpointError
from toolwise.serialization.files import (
    checkpoint_folders,
    disk_fault,
    final_path,
    is_final,
    make_folder,
    newest_first,
    remove,
    sibling_path,
    sync,
)
from toolwise.serialization.state import TensorCollector, encode
from toolwise.training.checkpoint.loader import Checkpoint, best_first
from toolwise.training.checkpoint.manifest import FORMAT, Manifest, read_if_complete, seal
from toolwise.training.checkpoint.registry import check_name

log = logging.getLogger("toolwise.training.checkpoint")


def save(
    folder: str | os.PathLike[str],
    step: int,
    registry_state: Mapping[str, Any],
    *,
    extra_files: Mapping[str, Callable[[Path], None]] | None = None,
    facts: Mapping[str, Any] | None = None,
    figures: Mapping[str, float] | None = None,
    keep_last: int = 3,
    keep_best: str = "",
) -> Checkpoint:
    """Write `folder/step-NNNNNN`, then remove checkpoints that are neither among the newest `keep_last` nor the best.
    There must be one writer per folder: hold a `FolderLock`.

    `extra_files` maps the name of a subfolder to a function that fills it, such as a model's `save_pretrained`.
    `figures` are the metrics of a validation at exactly this step; `keep_best` names one of them, as for `best`.
    Checkpoints of later steps are removed too: the run was rolled back, and must not resume from its discarded future.
    """
    if step < 0 or keep_last < 1:
        raise ValueError(f"step must be 0 or more and keep_last 1 or more, got {step} and {keep_last}")
    final = Path(folder) / f"step-{step:06d}"
    new = sibling_path(final, "tmp")
    finite = {name: float(value) for name, value in (figures or {}).items() if math.isfinite(value)}
    manifest = Manifest(
        format=FORMAT, step=step, parts=list(registry_state), facts=dict(facts or {}), figures=finite, files={}
    )
    _try_cleanup(lambda: _restore_leftovers(final.parent), final.parent)
    try:
        make_folder(final.parent)
        _write(new, registry_state, extra_files or {})
        seal(new, manifest)
        if final.exists():  # not an atomic swap: until it is done, `latest` finds the `.old-…` folder
            final.rename(sibling_path(final, "old"))
        new.rename(final)
        sync(final.parent)
    except BaseException as error:
        shutil.rmtree(new, ignore_errors=True)
        reason = disk_fault(error)
        if reason is not None or isinstance(error, OSError | SafetensorError):
            reason = reason or getattr(error, "strerror", None) or str(error)
            raise CheckpointError(f"cannot write {final}: {reason}; earlier checkpoints are unchanged") from error
        raise
    _try_cleanup(lambda: _prune(final, step, keep_last, keep_best), final.parent)
    return Checkpoint.from_manifest(final, manifest)


def _write(folder: Path, registry_state: Mapping[str, Any], extra_files: Mapping[str, Callable[[Path], None]]) -> None:
    folder.mkdir()
    for name, state in registry_state.items():
        _write_part(folder, name, state)
    for name, write in extra_files.items():
        check_name(name)
        (folder / name).mkdir()
        write(folder / name)


def _write_part(folder: Path, name: str, state: Any) -> None:
    from safetensors.torch import save_file

    check_name(name)
    tensors = TensorCollector()
    text = json.dumps(encode(state, name, tensors), allow_nan=False)
    (folder / f"{name}.json").write_text(text, encoding="ascii")
    if tensors.by_name:
        save_file(tensors.by_name, folder / f"{name}.safetensors")


def _restore_leftovers(folder: Path) -> None:
    """Before a save: rename complete `.old-…` folders that a crash left behind back to their final names, if those
    are missing or damaged, and remove all other leftovers."""
    for path in newest_first(folder):
        final = final_path(path)
        if is_final(path) or read_if_complete(path) is None:
            continue
        if final.exists() and read_if_complete(final) is None:
            remove([final])
        if not final.exists():
            path.rename(final)
    remove([path for path in checkpoint_folders(folder) if not is_final(path)])


def _prune(written: Path, step: int, keep_last: int, keep_best: str) -> None:
    """After a save: keep the newest complete checkpoints, the best, and always the one just written."""
    complete = [
        (path, manifest)
        for path in newest_first(written.parent)
        if (manifest := read_if_complete(path)) and is_final(path)
    ]
    for path in [path for path, manifest in complete if manifest.step > step]:
        log.warning("removed %s: the run was rolled back to step %d", path, step)
    past = [(path, manifest) for path, manifest in complete if manifest.step <= step]
    kept = {written, *(path for path, _ in past[:keep_last])}
    if keep_best:
        kept |= {path for path, _ in best_first(past, keep_best)[:1]}
    remove([path for path in checkpoint_folders(written.parent) if path not in kept])


def _try_cleanup(work: Callable[[], None], folder: Path) -> None:
    """Failed cleanup does not fail the save."""
    try:
        work()
    except OSError as error:
        log.warning("old checkpoints in %s could not be removed: %s", folder, error)
