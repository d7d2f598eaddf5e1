"""Adds or changes files of a saved checkpoint, for facts learned about the model after it was saved."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from toolwise.errors import CheckpointError
from toolwise.serialization.files import sibling_path, sync
from toolwise.training.checkpoint.loader import Checkpoint
from toolwise.training.checkpoint.manifest import MANIFEST, seal, verify


def amend(path: str | os.PathLike[str], files: Mapping[str, bytes]) -> Checkpoint:
    """Add or replace `files` (by name) in the checkpoint at `path` and seal it again; other files stay unchanged.

    Atomic like `save`: the new version is built next to the old one, with hard links to unchanged files.
    """
    path = Path(path)
    manifest = verify(path, hashes=True)
    new = sibling_path(path, "tmp")
    try:
        _link_all(path, new, excluded={MANIFEST, *files})
        for name, data in files.items():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            (new / name).write_bytes(data)
        manifest = manifest.model_copy(update={"files": {}, "seal": ""})
        seal(new, manifest)
        old = sibling_path(path, "old")
        path.rename(old)  # until the next line has run, `latest` finds the renamed folder
        new.rename(path)
        sync(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        raise CheckpointError(
            f"cannot write {path}: {error.strerror or error}; check disk space and permissions"
        ) from error
    return Checkpoint.from_manifest(path, manifest)


def _link_all(source: Path, target: Path, excluded: set[str]) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for file in sorted(source.rglob("*")):
        name = file.relative_to(source)
        if file.is_dir():
            (target / name).mkdir()
        elif name.as_posix() not in excluded:
            try:
                os.link(file, target / name)
            except OSError:  # the file system has no hard links
                shutil.copyfile(file, target / name)
