"""The tasks of a converted file: rows stay on disk, memory-mapped, and a task is built when it is read."""

from __future__ import annotations

import json
import mmap
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from toolwise.data.conversion import HASHES, IDS, PROFILES, ROWS, Hashes
from toolwise.data.files import row_error
from toolwise.data.row_layout import PLAIN, RowLayout
from toolwise.data.rows import read_task
from toolwise.errors import DataError
from toolwise.types import Task

_READS_MAPPED = 128
"""Reads of rows or batches before the pages of a column are released: each may map 64 kB or more."""


class TaskTable(Sequence[Task]):
    """The tasks in `folder`, which was converted from `path`. `limit`: only the first ones."""

    def __init__(
        self, folder: Path, path: Path, name: str, *, limit: int | None = None, layout: RowLayout = PLAIN
    ) -> None:
        self.folder, self.path, self.name, self.layout = folder, path, name, layout
        self._rows, self._ids = _Column(folder / ROWS), _Column(folder / IDS)
        self._length = len(self._rows) if limit is None else min(limit, len(self._rows))

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        try:
            row, task_id = json.loads(self._rows[number]), str(self._ids[number])
            task = read_task(self.path, number, row, {}, name=self.name, layout=self.layout)
        except (ValueError, DataError) as error:
            problem = f"its converted copy is damaged ({error}); delete {self.folder}, it is made again"
            raise row_error(self.path, number, "(whole row)", problem) from error
        return task if task.task_id == task_id else task.model_copy(update={"task_id": task_id})

    def id_lists(self) -> Iterator[list[str]]:
        """The ids of all tasks in order, a batch at a time."""
        left = len(self)
        for batch in self._ids.batches:
            if left > 0:
                self._ids.count_read()
                yield batch[:left].to_pylist()
            left -= len(batch)

    def ids_at(self, numbers: npt.NDArray[np.int64]) -> Iterator[list[str]]:
        """The ids of the tasks with these numbers, which are ascending."""
        import pyarrow as pa

        for start, batch in zip(self._ids.starts, self._ids.batches, strict=True):
            low, high = np.searchsorted(numbers, (start, start + len(batch)))
            if low < high:
                self._ids.count_read()
                yield batch.take(pa.array(numbers[low:high] - start)).to_pylist()

    @cached_property
    def hashes(self) -> Hashes:
        """`hash_of` each id."""
        hashes: Hashes = _load(self.folder / HASHES)[: len(self)]
        return hashes

    @cached_property
    def profiles(self) -> npt.NDArray[np.int32]:
        """The number of each task's profile."""
        profiles: npt.NDArray[np.int32] = _load(self.folder / PROFILES)[: len(self)]
        return profiles


class _Column:
    """One column of an Arrow file, memory-mapped.

    Pages that were read stay mapped, and count as the process's memory, until `count_read` unmaps them; the system
    keeps them in its cache as long as nobody needs the memory.
    """

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        reader = pa.ipc.open_file(pa.BufferReader(pa.py_buffer(self._map)))
        self._reads = 0
        self.batches = [self._batch(reader, index) for index in range(reader.num_record_batches)]
        ends = np.cumsum([len(batch) for batch in self.batches]).tolist()
        self.starts = [0, *ends[:-1]]
        self._length = ends[-1] if ends else 0

    def __len__(self) -> int:
        return int(self._length)

    def _batch(self, reader: Any, index: int) -> Any:
        self.count_read()
        return reader.get_batch(index).column(0)

    def count_read(self) -> None:
        """Now and then unmaps the pages read so far; they are mapped again when they are read."""
        self._reads += 1
        if self._reads % _READS_MAPPED == 0:
            self._map.madvise(mmap.MADV_DONTNEED)

    def __getitem__(self, number: int) -> Any:
        self.count_read()
        index = bisect_right(self.starts, number) - 1
        return self.batches[index][number - self.starts[index]].as_py()


def _load(path: Path) -> Any:
    return np.lib.format.open_memmap(path, mode="r")
