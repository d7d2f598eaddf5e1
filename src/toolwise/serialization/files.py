"""What a checkpoint asks of the file system: folders and names that outlast a power cut, and the names themselves.

A file's data is on the disk once the file is synced, its name once its folder is: neither brings the other along.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from uuid import uuid4

STEP_FOLDER = re.compile(r"step-(\d+)(?:\.(tmp|old)-.*)?")
"""`step-000012` is a checkpoint; `.tmp-…` is one being written or removed, `.old-…` one that is being replaced."""


_RUST = re.compile(r"\(os error (\d+)\)")
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.EIO, errno.EMFILE}


def disk_fault(fault: BaseException) -> str | None:
    """What the file system said where it refused a write; None for any other fault. Libraries in Rust (tokenizers,
    safetensors) raise exceptions of their own for it, with the error's number in their words."""
    number = fault.errno if isinstance(fault, OSError) else None
    if number is None and isinstance(fault, Exception) and (found := _RUST.search(str(fault))):
        number = int(found[1])
    return os.strerror(number) if number in _DISK else None


def sync(path: Path) -> None:
    """Bring a file's data, or a folder's names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    """`path` and whatever is missing above it, each name on the disk before anything is put under it."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def remove(paths: Iterable[Path]) -> None:
    """Folders of checkpoints. One that is half removed never bears a checkpoint's name, even after a power cut."""
    doomed = []
    renamed = set()
    for path in paths:
        if _kind(path) != "tmp":
            path = path.rename(sibling_path(path, "tmp"))
            renamed.add(path.parent)
        doomed.append(path)
    for parent in renamed:
        sync(parent)
    for path in doomed:
        shutil.rmtree(path)


def sibling_path(path: Path, why: str) -> Path:
    """A name that nobody has, beside `path` and of the same step."""
    return path.with_name(f"{final_path(path).name}.{why}-{os.getpid()}-{uuid4().hex[:8]}")


def final_path(path: Path) -> Path:
    """The name of a checkpoint, whatever it is called while it is being replaced."""
    return path.with_name(path.name.partition(".")[0])


def is_final(path: Path) -> bool:
    return _kind(path) is None


def checkpoint_folders(folder: Path) -> list[Path]:
    """All that is ours in `folder`, leftovers too; whatever else lies there is somebody else's."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return [path for path in paths if STEP_FOLDER.fullmatch(path.name) and path.is_dir()]


def newest_first(folder: Path) -> list[Path]:
    """The folders that may hold a checkpoint. One that was moved aside comes after the one in its place."""
    found = [path for path in checkpoint_folders(folder) if _kind(path) != "tmp"]
    return sorted(found, key=lambda path: (step_of(path), is_final(path), path), reverse=True)


def step_of(path: Path) -> int:
    found = STEP_FOLDER.fullmatch(path.name)
    assert found is not None
    return int(found[1])


def _kind(path: Path) -> str | None:
    found = STEP_FOLDER.fullmatch(path.name)
    return found[2] if found else None
