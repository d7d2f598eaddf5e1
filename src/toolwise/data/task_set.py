"""Tasks of several files, read when they are needed; and operations that work on them as on lists of tasks."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import TypeVar, overload

import numpy as np
import numpy.typing as npt

from toolwise.data.conversion import hash_of
from toolwise.data.profiles import profile_of
from toolwise.data.table import TaskTable
from toolwise.types import Task

Value = TypeVar("Value")
Indices = npt.NDArray[np.int64]
_CHUNK = 1 << 18


@dataclass(frozen=True, eq=False)
class TaskSet(Sequence[Task]):
    """The tasks of all parts in order, or a selection of them."""

    parts: Sequence[TaskTable | list[Task]]
    weights: Sequence[float] = ()
    """One per source; empty: every task is drawn once per epoch."""
    source_parts: Sequence[int] = ()
    """The number of parts of each source with a weight; empty: one each."""
    selection: Indices | None = None
    """Ascending indices into all tasks of the parts; None: all."""
    changes: tuple[Callable[[Task], Task], ...] = ()
    """Applied to each task when it is read."""
    keeps_profiles: bool = True
    """Whether tasks of equal profiles are still equal to the checks after `changes`."""

    def __len__(self) -> int:
        return self._ends[-1] if self.selection is None else len(self.selection)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            places = range(*index.indices(len(self)))
            if places.step < 0:
                return [self[place] for place in places]
            return self.select(np.arange(places.start, places.stop, places.step, dtype=np.int64))
        place = range(len(self))[index]
        if self.selection is not None:
            place = int(self.selection[place])
        part = bisect_right(self._ends, place)
        task = self.parts[part][place - self._starts[part]]
        for change in self.changes:
            task = change(task)
        return task

    def select(self, indices: Indices) -> TaskSet:
        """The tasks at these ascending indices."""
        return replace(self, selection=indices if self.selection is None else self.selection[indices])

    @cached_property
    def _ends(self) -> list[int]:
        return [int(end) for end in np.cumsum([len(part) for part in self.parts])]

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *self._ends[:-1]]

    @property
    def sizes(self) -> list[int]:
        """The number of selected tasks in each part."""
        if self.selection is None:
            return [len(part) for part in self.parts]
        return [int(size) for size in np.diff(np.searchsorted(self.selection, [0, *self._ends]))]

    @property
    def mixture(self) -> list[tuple[int, float]]:
        """The number of selected tasks of each source, with its weight; empty without weights."""
        sizes = iter(self.sizes)
        counts = self.source_parts or [1] * len(self.weights)
        return [(sum(islice(sizes, count)), weight) for count, weight in zip(counts, self.weights, strict=True)]

    def _selected(self) -> Iterator[tuple[TaskTable | list[Task], Indices | None]]:
        """Each part with the selected indices in it; None: all."""
        for part, start, end in zip(self.parts, self._starts, self._ends, strict=True):
            if self.selection is None:
                yield part, None
            else:
                low, high = np.searchsorted(self.selection, (start, end))
                yield part, self.selection[low:high] - start

    def id_lists(self) -> Iterator[list[str]]:
        for part, indices in self._selected():
            if isinstance(part, TaskTable):
                yield from part.id_lists() if indices is None else part.ids_at(indices)
            else:
                yield [part[index].task_id for index in (range(len(part)) if indices is None else indices)]

    @cached_property
    def hashes(self) -> npt.NDArray[np.uint64]:
        """`hash_of` the id of each task."""
        hashes = [
            np.asarray(_hashes(part) if indices is None else _hashes(part)[indices])
            for part, indices in self._selected()
        ]
        return np.concatenate(hashes)

    @cached_property
    def profiles(self) -> npt.NDArray[np.int32]:
        """A number for each task, equal for equal profiles within a part."""
        numbers, first = [], 0
        for part, indices in self._selected():
            profiles = part.profiles if isinstance(part, TaskTable) else _profiles(part)
            selected = np.asarray(profiles if indices is None else profiles[indices])
            numbers.append(selected + np.int32(first) if first else selected)
            first += int(profiles.max(initial=0)) + 1
        return np.concatenate(numbers) if len(numbers) > 1 else numbers[0]

    @cached_property
    def profile_counts(self) -> dict[int, int]:
        """The number of tasks of each profile, by the index of its first task, ascending."""
        if not self.keeps_profiles:
            return dict.fromkeys(range(len(self)), 1)
        first: dict[int, int] = {}
        counts: Counter[int] = Counter()
        for start in range(0, len(self), _CHUNK):  # at once, it would take several times the memory of the profiles
            found = np.unique(self.profiles[start : start + _CHUNK], return_index=True, return_counts=True)
            for number, place, count in zip(*(column.tolist() for column in found), strict=True):
                counts[first.setdefault(number, start + place)] += count
        return dict(sorted(counts.items()))

    @cached_property
    def distinct(self) -> Indices:
        """The index of the first task of each profile, ascending."""
        if not self.keeps_profiles:
            return np.arange(len(self), dtype=np.int64)
        return np.array(list(self.profile_counts), dtype=np.int64)


def _hashes(part: TaskTable | list[Task]) -> npt.NDArray[np.uint64]:
    if isinstance(part, TaskTable):
        return part.hashes
    return np.array([hash_of(task.task_id) for task in part], dtype=np.uint64)


def _profiles(tasks: list[Task]) -> npt.NDArray[np.int32]:
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(profile_of(task), len(numbers)) for task in tasks], dtype=np.int32)


def task_id_lists(tasks: Sequence[Task]) -> Iterator[list[str]]:
    """The ids of all tasks in order, in lists, without building the tasks of a file."""
    if isinstance(tasks, TaskSet):
        yield from tasks.id_lists()
    else:
        yield [task.task_id for task in tasks]


def distinct_tasks(tasks: Sequence[Task]) -> Iterator[Task]:
    """One task of each profile, the first, in order: enough for checks that read only what profiles have."""
    return (tasks[int(index)] for index in tasks.distinct) if isinstance(tasks, TaskSet) else iter(tasks)


def count_distinct(tasks: Sequence[Task]) -> Iterator[tuple[Task, int]]:
    """The tasks of `distinct_tasks`, each with the number of tasks that it stands for."""
    if isinstance(tasks, TaskSet):
        return ((tasks[index], count) for index, count in tasks.profile_counts.items())
    return ((task, 1) for task in tasks)


def map_distinct(tasks: Sequence[Task], function: Callable[[Task], Value]) -> list[Value]:
    """`function` of each task, called once per profile."""
    if not isinstance(tasks, TaskSet) or not tasks.keeps_profiles:
        return [function(task) for task in tasks]
    _, first, inverse = np.unique(tasks.profiles, return_index=True, return_inverse=True)
    values = [function(tasks[int(index)]) for index in first]
    return [values[number] for number in inverse.tolist()]


def filter_tasks(tasks: Sequence[Task], keep: Callable[[Task], bool]) -> Sequence[Task]:
    """The tasks for which `keep` is true; it may read only what profiles have."""
    kept = map_distinct(tasks, keep)
    if isinstance(tasks, TaskSet):
        return tasks.select(np.flatnonzero(kept))
    return [task for task, is_kept in zip(tasks, kept, strict=True) if is_kept]


def change_tasks(tasks: Sequence[Task], change: Callable[[Task], Task], *, keeps_profiles: bool) -> Sequence[Task]:
    """The changed tasks. `keeps_profiles`: tasks of equal profiles are changed in the same way."""
    if isinstance(tasks, TaskSet):
        keeps_profiles = keeps_profiles and tasks.keeps_profiles
        return replace(tasks, changes=(*tasks.changes, change), keeps_profiles=keeps_profiles)
    return [change(task) for task in tasks]


def set_aside(tasks: Sequence[Task], chosen: Collection[int]) -> tuple[Sequence[Task], Sequence[Task]]:
    """The tasks that are not at the indices `chosen`, and those that are."""
    if isinstance(tasks, TaskSet):
        is_chosen = np.zeros(len(tasks), dtype=bool)
        is_chosen[list(chosen)] = True
        return tasks.select(np.flatnonzero(~is_chosen)), tasks.select(np.flatnonzero(is_chosen))
    rest = [task for index, task in enumerate(tasks) if index not in chosen]
    return rest, [task for index, task in enumerate(tasks) if index in chosen]


def find_tasks(tasks: Sequence[Task], task_ids: Iterable[str]) -> dict[str, Task]:
    """The tasks with these ids; ids that no task has are left out."""
    return {task_id: tasks[index] for task_id, index in find_numbers(tasks, task_ids).items()}


def find_numbers(tasks: Sequence[Task], task_ids: Iterable[str]) -> dict[str, int]:
    """The index of the task with each of these ids; ids that no task has are left out."""
    wanted = set(task_ids)
    places: Iterable[int] = range(len(tasks))
    if isinstance(tasks, TaskSet):
        hashes = np.array([hash_of(task_id) for task_id in wanted], dtype=np.uint64)
        places = np.flatnonzero(np.isin(tasks.hashes, hashes)).tolist()
    ids = ((tasks[index].task_id, index) for index in places)
    return {task_id: index for task_id, index in ids if task_id in wanted}


def fingerprint(tasks: Sequence[Task]) -> str:
    """The SHA-256 of the ids as one JSON list, which is never in memory as a whole."""
    digest, separator = hashlib.sha256(b"["), b""
    for task_ids in task_id_lists(tasks):
        if task_ids:
            digest.update(separator + json.dumps(task_ids)[1:-1].encode())
            separator = b", "
    digest.update(b"]")
    return digest.hexdigest()
