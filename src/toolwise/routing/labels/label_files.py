"""Labels of rows, as files beside the data: written by `toolwise data label`, joined to tasks by row id."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolwise.data.files import Row, read_rows, row_error, write_rows
from toolwise.errors import DataError, ToolwiseError
from toolwise.routing.actions import Target, parse_target
from toolwise.routing.families import Family
from toolwise.serialization.json_text import json_text
from toolwise.types import Task

TARGET_KEY, FAMILIES_KEY = "router_target_action", "tool_families"
"""Where a task's labels stand, in `extra_info`, and what files call them."""
_COLUMNS = ("task_id", TARGET_KEY, FAMILIES_KEY, "labelled_by")


@dataclass(frozen=True, slots=True)
class Label:
    """What is said of one row."""

    task_id: str
    target: Target | None
    """None where nobody could tell."""
    families: Mapping[str, Family] = field(default_factory=dict)
    """Of the tools that the row offers."""
    labelled_by: str = ""
    """The model's name, or "heuristic"."""

    def row(self) -> Row:
        told = None if self.target is None else str(self.target)
        return {
            "task_id": self.task_id,
            TARGET_KEY: told,
            FAMILIES_KEY: {name: str(family) for name, family in self.families.items()},
            "labelled_by": self.labelled_by,
        }


@dataclass(frozen=True, slots=True)
class LabelledTasks:
    """Tasks with their labels, and what fitted nothing."""

    tasks: list[Task]
    labelled: int
    unlabelled: tuple[str, ...]
    """Tasks that no label names."""
    unmatched: tuple[str, ...]
    """Labels that name no task."""

    def describe(self) -> str:
        parts = [f"{self.labelled} of {len(self.tasks)} tasks have a label"]
        parts += [f"{len(self.unlabelled)} have none, first {self.unlabelled[0]}"] if self.unlabelled else []
        parts += [f"{len(self.unmatched)} labels name no task, first {self.unmatched[0]}"] if self.unmatched else []
        return "; ".join(parts)


def join_labels(tasks: Sequence[Task], labels: Iterable[Label]) -> LabelledTasks:
    """Every task with what its label says, in `extra_info`; labels that stand in the data give way to the file's."""
    by_id = {label.task_id: label for label in labels}
    known = {task.task_id for task in tasks}
    joined = [_with_label(task, by_id[task.task_id]) if task.task_id in by_id else task for task in tasks]
    return LabelledTasks(
        joined,
        labelled=len(known & by_id.keys()),
        unlabelled=tuple(task.task_id for task in tasks if task.task_id not in by_id),
        unmatched=tuple(name for name in by_id if name not in known),
    )


def _with_label(task: Task, label: Label) -> Task:
    told: dict[str, Any] = {} if label.target is None else {TARGET_KEY: str(label.target)}
    if label.families:
        told[FAMILIES_KEY] = {name: str(family) for name, family in label.families.items()}
    return task.model_copy(update={"extra_info": {**task.extra_info, **told}})


def count_routes(labels: Iterable[Label]) -> dict[str, int]:
    """How many rows each route has, "none" where there is no label."""
    counts = Counter("none" if label.target is None else str(label.target) for label in labels)
    return dict(counts.most_common())


def read_labels(path: str | Path) -> list[Label]:
    """From JSONL, JSON, Parquet or CSV; the first bad row is a `DataError`."""
    path = Path(path)
    rows = _read_csv(path) if path.suffix.lower() == ".csv" else read_rows(path)
    labels: dict[str, Label] = {}
    for number, row in enumerate(rows):
        label = _parse_label(path, number, row)
        if label.task_id in labels:
            raise row_error(path, number, "task_id", f"{label.task_id!r} has a label already; keep one of the two")
        labels[label.task_id] = label
    return list(labels.values())


def _parse_label(path: Path, number: int, row: Row) -> Label:
    name = row.get("task_id")
    if not isinstance(name, str) or not name:
        raise row_error(path, number, "task_id", f"{name!r} is no row's id; write the id that the task has")
    written, families = row.get(TARGET_KEY), row.get(FAMILIES_KEY) or {}
    if isinstance(families, str):
        try:
            families = json.loads(families)
        except (ValueError, RecursionError):
            raise row_error(path, number, FAMILIES_KEY, "text that is no JSON; write an object of tools") from None
    if not isinstance(families, Mapping):
        raise row_error(path, number, FAMILIES_KEY, f"{families!r:.60} is no object; write tool names with families")
    try:
        target = None if written in (None, "") else parse_target(written)
        found = {str(tool): Family.parse(family) for tool, family in families.items() if family is not None}
    except ToolwiseError as fault:
        raise row_error(path, number, TARGET_KEY if "action" in str(fault) else FAMILIES_KEY, str(fault)) from None
    return Label(name, target, found, str(row.get("labelled_by") or ""))


def _read_csv(path: Path) -> list[Row]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows: list[Row] = [dict(row) for row in csv.DictReader(file)]
    except (OSError, UnicodeDecodeError, csv.Error) as fault:
        raise DataError(f"{path}: cannot be read as CSV ({fault}); check the file") from fault
    if not rows or TARGET_KEY not in rows[0] or "task_id" not in rows[0]:
        raise DataError(f"{path}: has no rows with the columns task_id and {TARGET_KEY}; write these")
    return rows


def write_labels(labels: Sequence[Label], path: str | Path) -> None:
    """A sidecar, as JSONL or CSV by the ending of `path`; there whole or not at all."""
    path = Path(path)
    if path.suffix.lower() != ".csv":
        write_rows([label.row() for label in labels], path)
        return
    out = io.StringIO()
    writer = csv.DictWriter(out, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    for label in labels:
        row = label.row()
        writer.writerow(row | {FAMILIES_KEY: json_text(row[FAMILIES_KEY])})
    part = path.with_name(path.name + ".tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    part.write_text(out.getvalue(), encoding="utf-8")
    part.replace(path)


def write_columns(rows: Sequence[Row], labels: Sequence[Label], path: str | Path) -> None:
    """The data itself with two columns more, the families as JSON text: tools differ from row to row."""
    told = [label.row() for label in labels]
    more = [{TARGET_KEY: row[TARGET_KEY], FAMILIES_KEY: json_text(row[FAMILIES_KEY])} for row in told]
    write_rows([{**row, **extra} for row, extra in zip(rows, more, strict=True)], path)
