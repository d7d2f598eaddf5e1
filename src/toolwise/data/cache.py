"""The cache of converted task files: one folder per file, made once, used by all runs beside it.

A copy is used only if the file still has the size and the times that it had when it was converted. It is written to a
temporary folder and renamed, under a lock: a second process waits and uses what the first one made.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from toolwise.data.conversion import HASHES, IDS, PROFILES, ROWS, convert
from toolwise.data.files import one_line
from toolwise.data.row_layout import PLAIN, RowLayout
from toolwise.data.table import TaskTable
from toolwise.errors import DataError
from toolwise.serialization.files import sync, write_atomic
from toolwise.serialization.json_text import json_text

FORMAT = 3
"""Version of the converted files; a copy in another version is not used."""
CACHE_FOLDER = ".data-cache"
_SOURCE = "source.json"
_FILES = (ROWS, IDS, HASHES, PROFILES)
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}

log = logging.getLogger("toolwise.data")


def open_table(
    path: Path, name: str, cache: Path, progress: Callable[[str], None], layout: RowLayout = PLAIN
) -> TaskTable:
    """The tasks of a file, from its copy in `cache`, which is made first if there is none. Ids begin with `name`."""
    source = _identity(path, name, layout)
    family = _family(source)
    entry = cache / f"{family}-{_digest(source)}"
    if (table := _open(entry, path, name, source, layout)) is not None:
        return table
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(cache / f".{family}.lock", path, progress):
            if (table := _open(entry, path, name, source, layout)) is None:
                _remove_others(cache, family)
                progress(f"converting {path}, once, to {entry}")
                _make(entry, path, name, source, progress, layout)
                table = _open(entry, path, name, source, layout)
    except OSError as error:
        raise _disk_error(path, cache, error) from error
    if table is None:
        raise DataError(f"{path}: its converted copy {entry} cannot be read; check the disk")
    return table


def _identity(path: Path, name: str, layout: RowLayout) -> dict[str, Any]:
    """What a copy depends on. The time of the last change (ctime) also tells a file whose other time was set back."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from error
    times = {"modified": status.st_mtime_ns, "changed": status.st_ctime_ns}
    source = {"format": FORMAT, "path": os.path.realpath(path), "name": name, "size": status.st_size, **times}
    return source if layout.is_plain else source | {"layout": [dict(layout.columns), layout.system_prompt]}


def _family(source: dict[str, Any]) -> str:
    """The copies of one file under one name and in one layout, whatever its content, share it."""
    stem = re.sub(r"[^\w.-]", "_", source["name"])[-40:]
    return f"{stem}-{_digest([source[key] for key in ('path', 'name', 'layout') if key in source])}"


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()


def _open(entry: Path, path: Path, name: str, source: dict[str, Any], layout: RowLayout) -> TaskTable | None:
    """None if there is no copy, or one that is damaged."""
    try:
        recorded = json.loads((entry / _SOURCE).read_text("utf-8"))
        sizes = {file: (entry / file).stat().st_size for file in _FILES}
        if recorded["source"] != source or recorded["sizes"] != sizes:
            return None
        table = TaskTable(entry, path, name, layout=layout)
        return table if len(table) == recorded["rows"] == len(table.hashes) == len(table.profiles) else None
    except FileNotFoundError:
        return None
    except Exception as error:  # a damaged file can make the reader raise anything
        log.warning("%s cannot be used (%s): %s is converted again", entry, one_line(error), path)
        return None


def _make(
    entry: Path,
    path: Path,
    name: str,
    source: dict[str, Any],
    progress: Callable[[str], None],
    layout: RowLayout,
) -> None:
    temporary = entry.with_name(f".{entry.name}.{os.getpid()}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        rows = convert(path, name, temporary, progress, layout)
        if _identity(path, name, layout) != source:
            raise DataError(f"{path}: changed while it was read; start again when nothing writes to it")
        sizes = {file: (temporary / file).stat().st_size for file in _FILES}
        write_atomic(
            temporary / _SOURCE, json_text({"source": source, "rows": rows, "sizes": sizes}, indent=1).encode()
        )
        for file in _FILES:
            sync(temporary / file)
        shutil.rmtree(entry, ignore_errors=True)  # a damaged copy
        temporary.rename(entry)
        sync(entry.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_others(cache: Path, family: str) -> None:
    """Removes copies of earlier contents, and what killed processes left. A run that maps a copy keeps it."""
    for path in [*cache.glob(f"{family}-*"), *cache.glob(f".{family}-*.tmp")]:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _lock(lock: Path, path: Path, progress: Callable[[str], None]) -> Iterator[None]:
    """Waits while another process converts the same file. Without locks, each process makes a copy: the last stays."""
    handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process, which converts {path}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield
    finally:
        os.close(handle)


def _disk_error(path: Path, cache: Path, error: OSError) -> DataError:
    free = ""
    with suppress(OSError):
        free = f", {shutil.disk_usage(cache).free >> 20:,} MB are free"
    return DataError(
        f"{path}: its converted copy cannot be written to {cache} ({error.strerror or error}{free}); free some space, "
        "or set data.cache to another folder"
    )
