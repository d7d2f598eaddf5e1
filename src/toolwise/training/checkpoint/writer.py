"""Writes checkpoints of all registered state to a temporary folder, syncs, seals and renames it, and only then removes
old checkpoints. Facts learned about a model after it was saved are added in the same way."""

from __future__ import annotations

import json
import logging
import math
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from toolwise.errors import CheckpointError
from toolwise.protocols import Stateful
from toolwise.serialization.files import (
    checkpoint_folders,
    disk_fault,
    final_path,
    is_final,
    link_or_copy,
    make_folder,
    newest_first,
    remove,
    sibling_path,
    sync,
)
from toolwise.serialization.state import TensorCollector, encode
from toolwise.training.checkpoint.file_entry import FileEntry
from toolwise.training.checkpoint.loader import (
    FORMAT,
    MANIFEST,
    Checkpoint,
    Manifest,
    best_first,
    read_if_complete,
    seal,
    verify,
)

log = logging.getLogger("toolwise.training.checkpoint")

STAGED = ".staged-"
"""Start of the name of a folder with files for a checkpoint that is not written yet."""


@dataclass(frozen=True, slots=True)
class StateRegistry:
    """Stateful parts by name; each part's state is saved in files of that name."""

    parts: Mapping[str, Stateful]

    def state_dict(self) -> dict[str, dict[str, Any]]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: Mapping[str, dict[str, Any]]) -> None:
        """Restore every part; raise before changing anything if the names do not match."""
        missing, unexpected = self.parts.keys() - state.keys(), state.keys() - self.parts.keys()
        if missing or unexpected:
            problems = [f"lacks {', '.join(sorted(missing))}"] if missing else []
            problems += [f"has {', '.join(sorted(unexpected))}, unknown to this run"] if unexpected else []
            raise CheckpointError(f"the checkpoint {'; it '.join(problems)}: resume with the settings it was made with")
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


def check_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name) or f"{name}.json" == MANIFEST:
        raise ValueError(f"{name!r} cannot name a part: use letters, digits, '_', '.', '-', not 'manifest'")


class RngState:
    """The global generators of Python, numpy, torch, and the GPUs in use.

    The training loop uses only explicit seeds; tools, environments and rewards that run in this process may not.
    """

    def state_dict(self) -> dict[str, Any]:
        import numpy as np
        import torch

        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],  # type: ignore[no-untyped-call]
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        import numpy as np
        import torch

        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if len(state["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["cuda"])
        elif state["cuda"]:
            log.warning(
                "the checkpoint is from %d GPUs, this process has %d: their random state is not restored",
                len(state["cuda"]),
                torch.cuda.device_count(),
            )


def save(
    folder: str | os.PathLike[str],
    step: int,
    registry_state: Mapping[str, Any],
    *,
    extra_files: Mapping[str, Callable[[Path], None]] | None = None,
    extra_bytes: int = 0,
    known_files: Mapping[str, FileEntry] | None = None,
    facts: Mapping[str, Any] | None = None,
    figures: Mapping[str, float] | None = None,
    keep_last: int = 3,
    keep_best: str = "",
    abandoned: Callable[[], bool] = lambda: False,
) -> Checkpoint:
    """Write `folder/step-NNNNNN`, then remove checkpoints that are neither among the newest `keep_last` nor the best.
    There must be one writer per folder: hold a `FolderLock`.

    `extra_files` maps the name of a subfolder to a function that fills it, such as a model's `save_pretrained`;
    `extra_bytes` is about how much they write, for the check that all of it fits on the disk. `known_files` are entries
    of files that need not be read for their checksums.
    `figures` are the metrics of a validation at exactly this step; `keep_best` names one of them, as for `best`.
    Checkpoints of later steps are removed too: the run was rolled back, and must not resume from its discarded future.
    Once `abandoned` returns True, nothing more is written and the save raises.
    """
    if step < 0 or keep_last < 1:
        raise ValueError(f"step must be 0 or more and keep_last 1 or more, got {step} and {keep_last}")
    final = Path(folder) / f"step-{step:06d}"
    new = sibling_path(final, "tmp")
    manifest = Manifest(
        format=FORMAT,
        step=step,
        parts=list(registry_state),
        facts=dict(facts or {}),
        figures=finite(figures or {}),
        files={},
    )
    _try_cleanup(lambda: _restore_leftovers(final.parent), final.parent)
    with cleaning_up(new, final):
        make_folder(final.parent)
        check_disk_space(final, tensor_bytes(registry_state) + extra_bytes)
        new.mkdir()
        for name, state in registry_state.items():
            _check_abandoned(abandoned, final)
            _write_part(new, name, state)
        for name, write in (extra_files or {}).items():
            _check_abandoned(abandoned, final)
            check_name(name)
            (new / name).mkdir()
            write(new / name)
        _check_abandoned(abandoned, final)
        seal(new, manifest, known_files)
        _check_abandoned(abandoned, final)
        _swap_in(new, final)
    _try_cleanup(lambda: _prune(final, step, keep_last, keep_best), final.parent)
    return Checkpoint.from_manifest(final, manifest)


@contextmanager
def cleaning_up(folder: Path, final: Path) -> Iterator[None]:
    """Remove `folder` if an error occurs, and raise one line if it is the disk's; `final` is the checkpoint."""
    try:
        yield
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        reason = disk_fault(error)
        if reason is not None or isinstance(error, OSError | SafetensorError):
            reason = reason or getattr(error, "strerror", None) or str(error)
            raise CheckpointError(f"cannot write {final}: {reason}; earlier checkpoints are unchanged") from error
        raise


def check_disk_space(path: Path, needed: int) -> None:
    """Raise before anything is written if `needed` bytes do not fit on the disk of the new checkpoint `path`."""
    free = shutil.disk_usage(path.parent).free
    if needed > free:
        raise CheckpointError(
            f"cannot write {path}: it needs {needed / 1e9:.2f} GB and the disk has {free / 1e9:.2f} GB free; make room "
            "or lower trainer.keep_checkpoints; earlier checkpoints are unchanged"
        )


def tensor_bytes(state: Any) -> int:
    """Size of all tensors in nested dicts, lists and tuples."""
    if isinstance(state, Mapping):
        return sum(map(tensor_bytes, state.values()))
    if isinstance(state, list | tuple):
        return sum(map(tensor_bytes, state))
    return int(state.numel() * state.element_size()) if hasattr(state, "element_size") else 0


def _check_abandoned(abandoned: Callable[[], bool], final: Path) -> None:
    if abandoned():
        raise CheckpointError(f"{final} was not written: the run was stopped immediately")


def amend(
    path: str | os.PathLike[str],
    files: Mapping[str, bytes] | None = None,
    *,
    parts: Mapping[str, Any] | None = None,
    figures: Mapping[str, float] | None = None,
) -> Checkpoint:
    """Add or replace `files` (by name) and `parts` without tensors in the checkpoint at `path`, and its `figures` if
    given, and seal it again; the rest stays unchanged.

    Atomic like `save`: the new version is built next to the old one, with hard links to unchanged files.
    """
    path = Path(path)
    manifest = verify(path, hashes=True).model_copy(update={"files": {}, "seal": ""})
    if figures is not None:
        manifest.figures = finite(figures)
    data_of = {f"{name}.json": part_bytes(name, part, TensorCollector()) for name, part in (parts or {}).items()}
    new = sibling_path(path, "tmp")
    try:
        shutil.copytree(
            path,
            new,
            ignore=lambda folder, _: {MANIFEST} if Path(folder) == path else set(),
            copy_function=link_or_copy,
        )
        for name, data in {**(files or {}), **data_of}.items():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            (new / name).unlink(missing_ok=True)  # else the link's other end would change too
            (new / name).write_bytes(data)
        seal(new, manifest)
        shutil.rmtree(_swap_in(new, path), ignore_errors=True)
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        raise CheckpointError(
            f"cannot write {path}: {error.strerror or error}; check disk space and permissions"
        ) from error
    return Checkpoint.from_manifest(path, manifest)


def _swap_in(new: Path, final: Path) -> Path:
    """Put `new` in the place of `final`, which is renamed; return its new name. Not atomic: until it is done, `latest`
    finds the renamed folder."""
    old = sibling_path(final, "old")
    if final.exists():
        final.rename(old)
    new.rename(final)
    sync(final.parent)
    return old


def _write_part(folder: Path, name: str, state: Any) -> None:
    from safetensors.torch import save_file

    check_name(name)
    tensors = TensorCollector()
    (folder / f"{name}.json").write_bytes(part_bytes(name, state, tensors))
    if tensors.by_name:
        save_file(tensors.by_name, folder / f"{name}.safetensors")


def part_bytes(name: str, state: Any, tensors: TensorCollector) -> bytes:
    """A part's JSON; its tensors are collected."""
    return json.dumps(encode(state, name, tensors), allow_nan=False).encode("ascii")


def finite(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in figures.items() if math.isfinite(value)}


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
