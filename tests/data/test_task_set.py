"""Operations on tasks, which give the same for lists and for tasks that are read from disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolwise.data import load_tasks, open_tasks
from toolwise.data.task_set import (
    TaskSet,
    change_tasks,
    count_distinct,
    distinct_tasks,
    filter_tasks,
    find_tasks,
    map_distinct,
    set_aside,
    task_id_lists,
)
from toolwise.types import Task

KINDS: list[dict[str, Any]] = [
    {"prompt": "plain"},
    {"prompt": "tools", "tools": ["search"]},
    {"prompt": "truth", "ground_truth": 1},
    {"prompt": "column", "level": 2},
]


@pytest.fixture
def both(tmp_path: Path, all_files_large: None) -> tuple[TaskSet, list[Task]]:
    """The tasks of two files, from disk and in memory."""
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path in paths:
        path.write_text("".join(json.dumps(KINDS[number % 4]) + "\n" for number in range(10)))
    tasks = open_tasks([*paths], cache=tmp_path / "cache")
    assert isinstance(tasks, TaskSet)
    return tasks, [task for path in paths for task in load_tasks(path)]


def ids(tasks: Any) -> list[str]:
    return [task_id for part in task_id_lists(tasks) for task_id in part]


def test_ids_are_read_without_tasks(both: tuple[TaskSet, list[Task]]) -> None:
    assert ids(both[0]) == [task.task_id for task in both[1]]


@pytest.mark.parametrize("part", [slice(3), slice(2, 15, 3), slice(-4, None), slice(9, 2), slice(None, None, -2)])
def test_a_slice_has_the_tasks_of_a_list_slice(both: tuple[TaskSet, list[Task]], part: slice) -> None:
    assert list(both[0][part]) == both[1][part]
    assert ids(both[0][part]) == ids(both[1][part])


def test_an_index_out_of_range_is_an_index_error(both: tuple[TaskSet, list[Task]]) -> None:
    assert both[0][-1] == both[1][-1]
    with pytest.raises(IndexError):
        both[0][20]


def test_one_task_of_each_profile_and_file_is_distinct(both: tuple[TaskSet, list[Task]]) -> None:
    assert [task.prompt[0].content for task in distinct_tasks(both[0])] == ["plain", "tools", "truth", "column"] * 2
    assert list(distinct_tasks(both[1])) == both[1]


def test_each_distinct_task_stands_for_those_of_its_profile(both: tuple[TaskSet, list[Task]]) -> None:
    counts = [(task.task_id, count) for task, count in count_distinct(both[0].select(np.arange(1, 20)))]
    rows = ["a/row-1", "a/row-2", "a/row-3", "a/row-4", "b/row-0", "b/row-1", "b/row-2", "b/row-3"]
    assert counts == list(zip(rows, [3, 2, 2, 2, 3, 3, 2, 2], strict=True))
    assert [count for _, count in count_distinct(both[1])] == [1] * 20


def test_a_function_of_profiles_is_called_once_for_each(both: tuple[TaskSet, list[Task]]) -> None:
    calls: list[Task] = []

    def tools(task: Task) -> list[str] | None:
        calls.append(task)
        return task.tools

    assert map_distinct(both[0], tools) == [task.tools for task in both[1]]
    assert len(calls) == 8


def test_a_filter_and_a_split_keep_the_same_tasks(both: tuple[TaskSet, list[Task]]) -> None:
    kept, expected = (filter_tasks(tasks, lambda task: task.tools is None) for tasks in both)
    assert list(kept) == expected
    assert ids(kept) == ids(expected)
    (rest, chosen), (some, others) = (set_aside(tasks, {0, 4, 11}) for tasks in (kept, expected))
    assert (list(rest), list(chosen)) == (some, others)
    assert ids(rest) == ids(some)
    assert isinstance(rest, TaskSet)
    assert rest.sizes == [5, 6]


def test_changes_apply_when_a_task_is_read(both: tuple[TaskSet, list[Task]]) -> None:
    def add_tool(task: Task) -> Task:
        return task.model_copy(update={"tools": [*(task.tools or ()), "x"]})

    changed, expected = (change_tasks(tasks, add_tool, keeps_profiles=True) for tasks in both)
    assert list(changed[3:7]) == expected[3:7]
    assert len(list(distinct_tasks(changed))) == 8


def test_after_changes_by_id_all_tasks_are_distinct(both: tuple[TaskSet, list[Task]]) -> None:
    changed = change_tasks(both[0], lambda task: task, keeps_profiles=False)
    assert len(list(distinct_tasks(changed))) == 20
    assert len(map_distinct(changed, lambda task: task.task_id)) == 20


def test_tasks_are_found_by_id(both: tuple[TaskSet, list[Task]]) -> None:
    wanted = ["b/row-3", "a/row-0", "c/row-0"]
    assert find_tasks(both[0], wanted) == find_tasks(both[1], wanted)
    assert set(find_tasks(both[0][1:], wanted)) == {"b/row-3"}
