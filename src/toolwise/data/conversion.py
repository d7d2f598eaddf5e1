"""Converts a task file to memory-mapped files, once: every row is checked, and gets its id and its profile.

A converted file is a folder:

    rows.arrow      one JSON text per row
    ids.arrow       the id of each task
    hashes.npy      a 64-bit hash of each id, to find duplicates and tasks by id
    profiles.npy    a number for each distinct profile (profiles.py)

Memory use does not depend on the rows' contents: a few bytes per row are kept until the end.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from toolwise.data.files import ReadBudget, iterate_rows, row_error
from toolwise.data.profiles import profile_of
from toolwise.data.row_layout import PLAIN, RowLayout
from toolwise.data.rows import has_own_id, id_prefix, read_task
from toolwise.types import Task

ROWS, IDS, HASHES, PROFILES = "rows.arrow", "ids.arrow", "hashes.npy", "profiles.npy"
BATCH_ROWS = 4096
_BATCH_BYTES = 32 << 20
_MAX_UNPACKED = 50
"""A file may unpack to this many times its size without a limit set by the user; text compresses about 5 to 1."""
_PROGRESS_ROWS = 100_000

Hashes = npt.NDArray[np.uint64]
Progress = Callable[[str], None]


def convert(path: Path, name: str, folder: Path, progress: Progress, layout: RowLayout = PLAIN) -> int:
    """Writes the converted file to `folder`, which exists; returns its rows. Ids begin with `name`.

    Rows are stored as they are; what depends on `layout` are their ids, their profiles, and whether they are valid."""
    budget = ReadBudget(path, at_least=_MAX_UNPACKED * path.stat().st_size if path.exists() else 0)
    columns = _Columns()
    with ExitStack() as stack:
        rows = stack.enter_context(_ArrowFile(folder / ROWS, "row", binary=True))
        ids = stack.enter_context(_ArrowFile(folder / IDS, "task_id"))
        for number, (row, line) in enumerate(iterate_rows(path, budget)):
            task = read_task(path, number, row, {}, name=name, layout=layout)
            rows.add(json.dumps(row).encode() if line is None else line.strip())
            ids.add(task.task_id)
            columns.add(task, name, own_id=has_own_id(layout.rename(path, number, row)))
            if number and number % _PROGRESS_ROWS == 0:
                progress(f"converting {path}: {number:,} rows")
    _make_unique(path, folder, columns)
    np.save(folder / HASHES, np.frombuffer(columns.hashes, np.uint64))
    np.save(folder / PROFILES, np.frombuffer(columns.profiles, np.int32))
    return len(columns.hashes)


class _Columns:
    """What is kept of each row while a file is converted."""

    def __init__(self) -> None:
        self.hashes, self.profiles, self.prefixes = array("Q"), array("i"), array("i")
        self.own_id = bytearray()
        self.prefix_names: dict[str, int] = {}
        self._profile_numbers: dict[Hashable, int] = {}

    def add(self, task: Task, name: str, *, own_id: bool) -> None:
        self.hashes.append(hash_of(task.task_id))
        self.own_id.append(own_id)
        prefix = id_prefix(name, task.extra_info)
        self.prefixes.append(self.prefix_names.setdefault(prefix, len(self.prefix_names)))
        self.profiles.append(self._profile_numbers.setdefault(profile_of(task), len(self._profile_numbers)))


class _ArrowFile:
    """Writes one column to an Arrow file, in batches."""

    def __init__(self, path: Path, column: str, *, binary: bool = False) -> None:
        import pyarrow as pa

        self._pa, self._path = pa, path
        self._schema = pa.schema([(column, pa.binary() if binary else pa.string())])
        self._values: list[Any] = []
        self._bytes = 0

    def __enter__(self) -> _ArrowFile:
        with ExitStack() as stack:
            file = stack.enter_context(open(self._path, "wb"))
            self._writer = stack.enter_context(self._pa.ipc.new_file(file, self._schema))
            self._stack = stack.pop_all()
        return self

    def add(self, value: str | bytes) -> None:
        self._values.append(value)
        self._bytes += len(value)
        if len(self._values) >= BATCH_ROWS or self._bytes >= _BATCH_BYTES:
            self._flush()

    def _flush(self) -> None:
        column = self._pa.array(self._values, self._schema.field(0).type)
        self._writer.write_batch(self._pa.record_batch([column], schema=self._schema))
        self._values, self._bytes = [], 0

    def __exit__(self, kind: Any, error: Any, at: Any) -> None:
        if kind is None and self._values:
            self._flush()
        self._stack.__exit__(kind, error, at)


def hash_of(task_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(task_id.encode(), digest_size=8).digest(), "little")


def repeated(hashes: Hashes) -> npt.NDArray[np.int64]:
    """The rows whose hash an earlier row has, in order."""
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    return np.sort(order[1:][ordered[1:] == ordered[:-1]])


def id_lists(folder: Path) -> Iterator[list[str]]:
    """The ids in a converted file, a batch at a time."""
    import pyarrow as pa

    with pa.memory_map(str(folder / IDS)) as source:
        reader = pa.ipc.open_file(source)
        for index in range(reader.num_record_batches):
            yield reader.get_batch(index).column(0).to_pylist()


def _make_unique(path: Path, folder: Path, columns: _Columns) -> None:
    """Gives rows whose id an earlier row has an id by their number, as `read_task` does if it knows earlier rows."""
    duplicates = repeated(np.frombuffer(columns.hashes, np.uint64))
    if not len(duplicates):
        return
    # usually the new ids are new: then only they are computed, else ids are compared with all before them
    renamed = _rename_repeated(path, folder, columns, duplicates) or _rename_in_order(path, folder, columns)
    with _ArrowFile(folder / f"{IDS}.new", "task_id") as ids:
        for number, task_id in enumerate(renamed()):
            ids.add(task_id)
            columns.hashes[number] = hash_of(task_id)
    (folder / f"{IDS}.new").replace(folder / IDS)


def _rename_repeated(
    path: Path, folder: Path, columns: _Columns, duplicates: npt.NDArray[np.int64]
) -> Callable[[], Iterator[str]] | None:
    """None if a new id is also the id of another row."""
    hashes = np.frombuffer(columns.hashes, np.uint64)
    known = np.sort(hashes)
    prefixes = list(columns.prefix_names)

    def new_id(number: int) -> str:
        return f"{prefixes[columns.prefixes[number]]}/row-{number}"

    for number in duplicates.tolist():
        if columns.own_id[number]:
            return None  # an error, unless the hashes only collide
        value = np.uint64(hash_of(new_id(number)))
        place = int(np.searchsorted(known, value))
        if place < len(known) and known[place] == value:
            return None

    def renamed() -> Iterator[str]:
        pending, number = iter([*duplicates.tolist(), -1]), 0
        following = next(pending)
        for batch in id_lists(folder):
            for task_id in batch:
                if number == following:
                    task_id, following = new_id(number), next(pending)
                yield task_id
                number += 1

    return renamed


def _rename_in_order(path: Path, folder: Path, columns: _Columns) -> Callable[[], Iterator[str]]:
    """Compares each id with all before it, which takes memory for all of them."""
    rows_by_id: dict[str, int] = {}
    prefixes = list(columns.prefix_names)
    for number, task_id in enumerate(task_id for batch in id_lists(folder) for task_id in batch):
        if task_id in rows_by_id:
            if columns.own_id[number]:
                raise duplicate_id(path, number, task_id, f"row {rows_by_id[task_id]}")
            task_id = f"{prefixes[columns.prefixes[number]]}/row-{number}"
            while task_id in rows_by_id:
                task_id += "+"
        rows_by_id[task_id] = number
    return lambda: iter(rows_by_id)


def duplicate_id(path: Path, number: int, task_id: str, earlier: str) -> Exception:
    return row_error(path, number, "task_id", f"{task_id!r} is already the id of {earlier}; make each id unique")
