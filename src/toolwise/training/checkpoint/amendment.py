"""A checkpoint with other words in one of its files: what is found out about a model after it was saved."""

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
    """The checkpoint at `path` with `files` (names within it) new or changed, sealed anew. All else stays as it is.

    Whole at every moment, as with `save`: the new one is made aside, of links to what does not change.
    """
    path = Path(path)
    manifest = verify(path, hashes=True)
    new = sibling_path(path, "tmp")
    try:
        _link_all(path, new, without={MANIFEST, *files})
        for name, data in files.items():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            (new / name).write_bytes(data)
        manifest = manifest.model_copy(update={"files": {}, "seal": ""})
        seal(new, manifest)
        old = sibling_path(path, "old")
        path.rename(old)  # until the next line is done, `latest` takes what was moved aside
        new.rename(path)
        sync(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}; check space and permissions") from error
    return Checkpoint.from_manifest(path, manifest)


def _link_all(source: Path, target: Path, without: set[str]) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for found in sorted(source.rglob("*")):
        name = found.relative_to(source)
        if found.is_dir():
            (target / name).mkdir()
        elif name.as_posix() not in without:
            try:
                os.link(found, target / name)
            except OSError:  # a file system without links
                shutil.copyfile(found, target / name)
