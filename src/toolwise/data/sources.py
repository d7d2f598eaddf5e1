"""Opens a run's tasks: one file, or several files and globs, with or without weights.

Small files are read at once. Larger ones are converted once and then read from disk, task by task.
"""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Callable, Sequence
from os.path import exists, realpath
from pathlib import Path
from typing import NamedTuple

import numpy as np

from toolwise.config.data import TaskSources, source_paths, source_weights
from toolwise.data.cache import CACHE_FOLDER, open_table
from toolwise.data.conversion import duplicate_id, repeated
from toolwise.data.files import open_data, read_rows
from toolwise.data.prompts import as_unicode
from toolwise.data.row_layout import PLAIN, RowLayout
from toolwise.data.rows import tasks_from_rows
from toolwise.data.table import TaskTable
from toolwise.data.task_set import TaskSet
from toolwise.errors import DataError
from toolwise.types import Task

SMALL_BYTES = 8 << 20
SMALL_ROWS = 20_000
"""Files up to this size, and selections of up to so many rows, are read at once."""
DEFAULT_CACHE = Path("runs") / CACHE_FOLDER
"""Where converted files go if the folder of the run is not known."""


class TaskFile(NamedTuple):
    path: Path
    name: str
    """What the ids of its tasks begin with."""


def open_tasks(
    sources: TaskSources,
    *,
    limit: int | None = None,
    cache: Path | None = None,
    layout: RowLayout = PLAIN,
    progress: Callable[[str], None] = lambda text: None,
) -> Sequence[Task]:
    """The tasks of all sources in order: a list if they are few, else read from `cache` when needed.

    `limit`: only the first ones; of each source, if sources have weights.
    """
    files, weights = find_files(sources), source_weights(sources)
    parts: list[TaskTable | list[Task]] = []
    opened: list[TaskFile] = []
    source_parts: list[int] = []
    left = limit
    for group, weight in zip(files, weights, strict=True):
        left = left if weight is None else limit
        before = len(parts)
        for file in group:
            if left is None or left > 0:
                parts.append(_open_file(file, left, cache or DEFAULT_CACHE, progress, layout))
                opened.append(file)
                left = None if left is None else left - len(parts[-1])
        source_parts.append(len(parts) - before)
    _check_unique(parts, opened)
    known = [weight for weight in weights if weight is not None]
    if not known and all(isinstance(part, list) for part in parts):
        return [task for part in parts for task in part]
    return TaskSet(parts, known, source_parts if known else ())


def find_files(sources: TaskSources) -> list[list[TaskFile]]:
    """The files of each source, sorted, each with a name that no other one has."""
    groups = [_matches(path.expanduser()) for path in source_paths(sources)]
    paths = [path for group in groups for path in group]
    for path, count in Counter(map(realpath, paths)).items():
        if count > 1:
            raise DataError(f"{path}: is named {count} times in the data; name each file once")
    names = _names(paths)
    return [[TaskFile(path, names[path]) for path in group] for group in groups]


def _matches(path: Path) -> list[Path]:
    if not glob.has_magic(str(path)) or exists(path):  # a file may have such a name
        return [path]
    matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
    files = [match for match in matches if not match.is_dir()]
    if not files:
        raise DataError(f"{path}: no file matches; check the pattern (relative paths start at {Path.cwd()})")
    return files


def _names(paths: Sequence[Path]) -> dict[Path, str]:
    """The stem of each path; with as many folders before it as it takes to tell those with equal stems apart."""
    names = {path: as_unicode(path.stem) for path in paths}
    for depth in range(1, max((len(path.absolute().parts) for path in paths), default=1)):
        counts = Counter(names.values())
        shared = [path for path in paths if counts[names[path]] > 1]
        for path in shared:
            # a/x.jsonl and a/x.parquet differ in their suffixes only
            parts = path.absolute().parts[-depth - 1 : -1]
            names[path] = as_unicode("/".join((*parts, path.stem if depth == 1 else path.name)))
        if not shared:
            break
    return names


def _open_file(
    file: TaskFile, limit: int | None, cache: Path, progress: Callable[[str], None], layout: RowLayout
) -> TaskTable | list[Task]:
    few = limit is not None and limit <= SMALL_ROWS
    if few or _is_small(file.path):
        return tasks_from_rows(file.path, read_rows(file.path, limit=limit), name=file.name, layout=layout)
    table = open_table(file.path, file.name, cache, progress, layout)
    if limit is None:
        return table
    return TaskTable(table.folder, file.path, file.name, limit=limit, layout=layout)


def _is_small(path: Path) -> bool:
    """Also true of files that cannot be read, which reading reports."""
    try:
        if path.stat().st_size > SMALL_BYTES:
            return not path.is_file()
        if path.suffix.lower() != ".parquet":
            return True
        import pyarrow.parquet as pq

        with open_data(path) as opened, pq.ParquetFile(opened) as parquet:
            return int(parquet.metadata.num_rows) <= SMALL_ROWS
    except Exception:  # a damaged file can make the reader raise anything
        return True


def _check_unique(parts: Sequence[TaskTable | list[Task]], files: Sequence[TaskFile]) -> None:
    """Raises if two files have a task of the same id. Within a file, ids are unique."""
    if len(parts) < 2:
        return
    tasks = TaskSet(parts)
    starts = [0, *np.cumsum(tasks.sizes).tolist()]

    def place(index: int) -> tuple[Path, int]:
        part = int(np.searchsorted(starts, index, side="right")) - 1
        return files[part].path, index - starts[part]

    for index in repeated(tasks.hashes).tolist():
        earlier = int(np.flatnonzero(tasks.hashes == tasks.hashes[index])[0])
        task_id = tasks[index].task_id
        if task_id == tasks[earlier].task_id:
            path, row = place(earlier)
            raise duplicate_id(*place(index), task_id, f"row {row} of {path}")
