"""Atomic files, and checkpoint folders on disk: their names, and file operations that survive a power cut.

Syncing a file writes its data, syncing its folder writes its name; neither implies the other.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from uuid import uuid4

STEP_FOLDER = re.compile(r"step-(\d+)(?:\.(tmp|old)-.*)?")
"""`step-000012` is a checkpoint; `.tmp-…` is one being written or removed, `.old-…` one being replaced."""


_RUST_ERRNO = re.compile(r"\(os error (\d+)\)")
_DISK_ERRNO = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.EIO, errno.EMFILE}


def disk_fault(fault: BaseException) -> str | None:
    """The file system's error message if a write was refused; None for any other exception.

    Rust libraries (tokenizers, safetensors) raise their own exception types, with the errno in the text.
    """
    number = fault.errno if isinstance(fault, OSError) else None
    if number is None and isinstance(fault, Exception) and (match := _RUST_ERRNO.search(str(fault))):
        number = int(match[1])
    return os.strerror(number) if number in _DISK_ERRNO else None


def sync(path: Path) -> None:
    """fsync a file's data or a folder's entries."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomic(path: Path, data: bytes, *, private: bool = False) -> None:
    """Write a file that exists completely or not at all, even if the process dies; `private`: mode 0600."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, 0o600 if private else 0o666)) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def link_or_copy(source: str, target: str) -> None:
    """Another name for a file that nobody changes in place; a copy where the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def make_folder(path: Path) -> None:
    """Create `path` and its missing parents, syncing each name before anything is created below it."""
    for folder in reversed([folder for folder in (path, *path.parents) if not folder.exists()]):
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def remove(paths: Iterable[Path]) -> None:
    """Remove checkpoint folders. A half-removed one never has a checkpoint's name, even after a power cut."""
    to_remove = list(paths)
    renamed = {path: path.rename(sibling_path(path, "tmp")) for path in to_remove if _kind(path) != "tmp"}
    for parent in {path.parent for path in renamed}:
        sync(parent)
    for path in to_remove:
        shutil.rmtree(renamed.get(path, path))


def sibling_path(path: Path, suffix: str) -> Path:
    """An unused name next to `path`, for the same step."""
    return path.with_name(f"{final_path(path).name}.{suffix}-{os.getpid()}-{uuid4().hex[:8]}")


def final_path(path: Path) -> Path:
    """The checkpoint's final name, without a `.tmp-…` or `.old-…` suffix."""
    return path.with_name(path.name.partition(".")[0])


def is_final(path: Path) -> bool:
    return _kind(path) is None


def checkpoint_folders(folder: Path) -> list[Path]:
    """All checkpoint folders in `folder`, including leftovers; other files are ignored."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return [path for path in paths if STEP_FOLDER.fullmatch(path.name) and path.is_dir()]


def newest_first(folder: Path) -> list[Path]:
    """The folders that may hold a checkpoint. A replaced (`.old-…`) one follows the one that replaced it."""
    candidates = (path for path in checkpoint_folders(folder) if _kind(path) != "tmp")
    return sorted(candidates, key=lambda path: (step_of(path), is_final(path), path), reverse=True)


def step_of(path: Path) -> int:
    return int(final_path(path).name.removeprefix("step-"))


def _kind(path: Path) -> str | None:
    match = STEP_FOLDER.fullmatch(path.name)
    return match[2] if match else None
