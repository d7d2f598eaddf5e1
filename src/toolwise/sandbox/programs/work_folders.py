"""Working folders of programs, one per rollout: created at its start, kept between calls, removed at its end."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from toolwise.errors import DataError
from toolwise.sandbox.pool import make_root
from toolwise.sandbox.scratch import remove_in_background, remove_root


@dataclass(frozen=True, slots=True)
class WorkFolder:
    """The folder of one rollout; programs see only `work_path`."""

    path: Path
    lock: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)
    """Held while its files are copied."""

    @property
    def work_path(self) -> Path:
        return self.path / "work"


class WorkFolders:
    """All folders of one sandbox, under a root that exists while any of them does. Thread-safe."""

    def __init__(self) -> None:
        self._lock, self._pid = threading.Lock(), os.getpid()
        self._root: tuple[Path, int] | None = None
        self._open: set[WorkFolder] = set()
        self._numbers = itertools.count(1)

    def open(self, files: Mapping[str, str]) -> WorkFolder:
        """Create a folder with `files` (name -> text) in it."""
        with self._lock:
            if self._root is None:
                self._root = make_root()
            folder = WorkFolder(self._root[0] / str(next(self._numbers)))
            self._open.add(folder)
        try:
            folder.work_path.mkdir(parents=True, mode=0o700)
            for name, text in files.items():
                _write_file(folder.work_path, name, text)
        except BaseException:
            self.remove(folder)
            raise
        return folder

    def temporary(self, folder: WorkFolder) -> Path:
        """Create a temporary folder for one call, beside the working folder."""
        path = folder.path / f"tmp-{next(self._numbers)}"
        path.mkdir(mode=0o700)
        return path

    def remove(self, folder: WorkFolder) -> None:
        remove_in_background(folder.path)
        with self._lock:
            self._open.discard(folder)
            if self._open:
                return
        self.close()

    def close(self) -> None:
        """Remove all folders."""
        with self._lock:
            root, self._root = self._root, None
            self._open.clear()
        if root is None:
            return
        if self._pid == os.getpid():  # else this is a forked child: they belong to the parent
            remove_root(root[0])
        os.close(root[1])


def _write_file(folder: Path, name: str, text: str) -> None:
    relative = PurePosixPath(name)
    if not name or relative.is_absolute() or ".." in relative.parts or "\0" in name:
        raise DataError(f"files: {name!r} is not a relative path in the working folder; write one like 'data/rows.csv'")
    if not isinstance(text, str):
        raise DataError(f"files: {name} must be a string, got {type(text).__name__}")
    path = folder / relative
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="replace")
