"""Label files, and joining them to tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolwise.data import load_tasks
from toolwise.data.files import read_rows
from toolwise.errors import DataError
from toolwise.routing.families import MIXED, Family, RouteAction
from toolwise.routing.labels.label_files import (
    Label,
    count_routes,
    join_labels,
    read_labels,
    write_columns,
    write_labels,
)
from toolwise.routing.learned_router import target_of
from toolwise.types import Task

RLLA = Path(__file__).parents[2] / "fixtures" / "rlla_test.parquet"
LABELS = [
    Label("a", RouteAction.ANSWER, {}, "m"),
    Label("b", MIXED, {"Get, News": Family.SEARCH, "add": Family.CALCULATE}, "m"),
    Label("c", None, {"x": Family.OTHER}, "heuristic"),
]


def task(name: str, **extra: object) -> Task:
    return Task(task_id=name, prompt=[{"role": "user", "content": "?"}], extra_info=dict(extra))


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".parquet"])
def test_round_trip(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"labels{ending}"
    write_labels(LABELS, path)
    assert read_labels(path) == LABELS


def test_labels_are_joined_by_row_id_and_mismatches_reported() -> None:
    joined, description = join_labels([task("b", kind="k"), task("z"), task("a")], LABELS)
    assert [target_of(each) for each in joined] == [MIXED, None, RouteAction.ANSWER]
    assert joined[0].extra_info["tool_families"] == {"Get, News": "SEARCH", "add": "CALCULATE"}
    assert joined[0].extra_info["kind"] == "k"
    assert description == "2 of 3 tasks have a label; 1 have none, first z; 1 labels match no task, first c"


def test_a_label_without_a_target_takes_none_away() -> None:
    joined, _ = join_labels([task("c", router_target_action="ANSWER")], LABELS)
    assert target_of(joined[0]) is RouteAction.ANSWER
    assert joined[0].extra_info["tool_families"] == {"x": "OTHER"}


def test_columns_beside_the_data_come_back_with_the_tasks_and_not_as_arguments_of_the_reward(tmp_path: Path) -> None:
    before = load_tasks(RLLA)
    labels = [Label(each.task_id, RouteAction.SEARCH_FAMILY, {"GetNews": Family.SEARCH}) for each in before]
    path = tmp_path / "rlla_test.parquet"
    write_columns(read_rows(RLLA), labels, path)
    after = load_tasks(path)
    assert [each.task_id for each in after] == [each.task_id for each in before]
    assert all(target_of(each) is RouteAction.SEARCH_FAMILY for each in after)
    assert all(each.extra_info["tool_families"] == {"GetNews": "SEARCH"} for each in after)
    assert [each.reward_kwargs for each in after] == [each.reward_kwargs for each in before]
    assert [each.ground_truth for each in after] == [each.ground_truth for each in before]


def test_shares_count_rows_without_a_label_too() -> None:
    assert count_routes([*LABELS, LABELS[0]]) == {"ANSWER": 2, "MIXED": 1, "none": 1}


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ('{"router_target_action": "ANSWER"}', "task_id"),
        ('{"task_id": "a", "router_target_action": "MAYBE"}', "router_target_action"),
        ('{"task_id": "a", "tool_families": {"x": "FRUIT"}}', "tool_families"),
        ('{"task_id": "a", "tool_families": [1]}', "tool_families"),
        ('{"task_id": "a", "tool_families": "{"}', "tool_families"),
    ],
)
def test_bad_labels_are_named_by_file_row_and_field(tmp_path: Path, line: str, field: str) -> None:
    path = tmp_path / "labels.jsonl"
    path.write_text('{"task_id": "first", "router_target_action": null}\n' + line + "\n")
    with pytest.raises(DataError, match=rf"labels.jsonl: row 1 \(0-based\), field {field}"):
        read_labels(path)


def test_a_row_with_two_labels_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    write_labels([LABELS[0], LABELS[0]], path)
    with pytest.raises(DataError, match="already"):
        read_labels(path)


def test_a_csv_without_label_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="task_id and router_target_action"):
        read_labels(path)
