"""Label files: written by `toolwise data label`, joined to tasks by row id."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from toolwise.data.files import Row, read_rows, row_error, write_rows
from toolwise.data.task_set import change_tasks, task_id_lists
from toolwise.errors import DataError, ToolwiseError
from toolwise.routing.families import Target, parse_family, parse_target
from toolwise.serialization.files import write_atomic
from toolwise.serialization.json_text import json_text, load_json
from toolwise.types import Task

TARGET_KEY, FAMILIES_KEY = "router_target_action", "tool_families"
"""Keys of a task's labels in `extra_info` and in label files."""
LABELLED_BY_KEY, FAMILIES_BY_KEY = "labelled_by", "families_by"
"""In label files: who made the target, and who the family of each tool."""
MAKER_KEY = "router_labelled_by"
"""The former in a task's `extra_info`, and among the columns of the data."""
_COLUMNS = ("task_id", TARGET_KEY, FAMILIES_KEY, LABELLED_BY_KEY, FAMILIES_BY_KEY)


@dataclass(frozen=True, slots=True)
class Label:
    task_id: str
    target: Target | None
    """None if it is unknown."""
    families: Mapping[str, str] = field(default_factory=dict)
    """Tool name -> family, for the row's tools."""
    labelled_by: str = ""
    """Who made the target: the model's name, or "heuristic"; empty if there is no target."""
    families_by: Mapping[str, str] = field(default_factory=dict)
    """Tool name -> who named its family: "declared" (the tool), "rules", or the model."""

    def row(self) -> Row:
        makers = {FAMILIES_BY_KEY: dict(self.families_by)} if self.families_by else {}
        return makers | {
            "task_id": self.task_id,
            TARGET_KEY: None if self.target is None else str(self.target),
            FAMILIES_KEY: {name: str(family) for name, family in self.families.items()},
            LABELLED_BY_KEY: self.labelled_by,
        }


def join_labels(tasks: Sequence[Task], labels: Iterable[Label]) -> tuple[Sequence[Task], str]:
    """The tasks with the labels in their `extra_info`, where they override those of the data; and a line about them."""
    by_id = {label.task_id: label for label in labels}
    matched: set[str] = set()
    unlabelled, first = 0, ""
    for task_id in (task_id for task_ids in task_id_lists(tasks) for task_id in task_ids):
        if task_id in by_id:
            matched.add(task_id)
        else:
            unlabelled, first = unlabelled + 1, first or task_id
    unmatched = [name for name in by_id if name not in matched]
    parts = [f"{len(matched)} of {len(tasks)} tasks have a label"]
    parts += [f"{unlabelled} have none, first {first}"] if unlabelled else []
    parts += [f"{len(unmatched)} labels match no task, first {unmatched[0]}"] if unmatched else []

    def with_label(task: Task) -> Task:
        return _with_label(task, by_id[task.task_id]) if task.task_id in by_id else task

    return change_tasks(tasks, with_label, keeps_profiles=False), "; ".join(parts)


def _with_label(task: Task, label: Label) -> Task:
    labels = {key: value for key, value in label.row().items() if key in (TARGET_KEY, FAMILIES_KEY) and value}
    labels |= {MAKER_KEY: label.labelled_by} if label.labelled_by else {}
    return task.model_copy(update={"extra_info": {**task.extra_info, **labels}})


def count_routes(labels: Iterable[Label]) -> dict[str, int]:
    """route -> number of rows, with "none" for rows without a label."""
    return dict(Counter("none" if label.target is None else str(label.target) for label in labels).most_common())


def read_labels(path: str | Path, *, any_name: bool = False) -> list[Label]:
    """Reads JSONL, JSON, Parquet or CSV; raises `DataError` at the first bad row. `any_name`: routes and families may
    have any name, not only the default ones."""
    path = Path(path)
    rows = _read_csv(path) if path.suffix.lower() == ".csv" else read_rows(path)
    labels: dict[str, Label] = {}
    for number, row in enumerate(rows):
        label = _parse_label(path, number, row, any_name)
        if label.task_id in labels:
            raise row_error(path, number, "task_id", f"{label.task_id!r} already has a label; keep one of the two")
        labels[label.task_id] = label
    return list(labels.values())


def _parse_label(path: Path, number: int, row: Row, any_name: bool) -> Label:
    name = row.get("task_id")
    if not isinstance(name, str) or not name:
        raise row_error(path, number, "task_id", f"{name!r} is not a row id; write the id of the task")
    written, given_families = row.get(TARGET_KEY), row.get(FAMILIES_KEY) or {}
    families = load_json(given_families) if isinstance(given_families, str) else given_families
    if not isinstance(families, Mapping):
        raise row_error(
            path, number, FAMILIES_KEY, f"{given_families!r:.60} is not a JSON object; write tool names with families"
        )
    try:
        target = None if written in (None, "") else str(written) if any_name else parse_target(written)
        parsed_families = {
            str(tool): parse_family(family, any_name=any_name)
            for tool, family in families.items()
            if family is not None
        }
    except ToolwiseError as fault:
        raise row_error(path, number, TARGET_KEY if "action" in str(fault) else FAMILIES_KEY, str(fault)) from None
    makers = row.get(FAMILIES_BY_KEY) or {}
    makers = load_json(makers) if isinstance(makers, str) else makers
    families_by = {str(tool): str(maker) for tool, maker in makers.items()} if isinstance(makers, Mapping) else {}
    return Label(name, target, parsed_families, str(row.get(LABELLED_BY_KEY) or ""), families_by)


def _read_csv(path: Path) -> list[Row]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows: list[Row] = [dict(row) for row in csv.DictReader(file)]
    except (OSError, UnicodeDecodeError, csv.Error) as fault:
        raise DataError(f"{path}: cannot be read as CSV ({fault}); check the file") from fault
    if not rows or TARGET_KEY not in rows[0] or "task_id" not in rows[0]:
        raise DataError(f"{path}: no rows with the columns task_id and {TARGET_KEY}; add them")
    return rows


def write_labels(labels: Sequence[Label], path: str | Path) -> None:
    """Writes a label file, JSONL or CSV by the suffix of `path`, atomically."""
    path = Path(path)
    if path.suffix.lower() != ".csv":
        write_rows([label.row() for label in labels], path)
        return
    out = io.StringIO()
    writer = csv.DictWriter(out, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    tables = (FAMILIES_KEY, FAMILIES_BY_KEY)
    writer.writerows(row | {key: json_text(row.get(key, {})) for key in tables} for row in map(Label.row, labels))
    write_atomic(path, out.getvalue().encode())


def write_columns(rows: Sequence[Row], labels: Sequence[Label], path: str | Path) -> None:
    """Writes the data with the labels as extra columns; families are JSON text, because tools differ from row to
    row."""
    columns = [
        {
            TARGET_KEY: row[TARGET_KEY],
            FAMILIES_KEY: json_text(row[FAMILIES_KEY]),
            MAKER_KEY: row[LABELLED_BY_KEY] or None,
        }
        for row in map(Label.row, labels)
    ]
    write_rows([{**row, **extra} for row, extra in zip(rows, columns, strict=True)], path)
