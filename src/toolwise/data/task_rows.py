"""Converts tasks back to rows, the inverse of `read_task`, for tasks created in Python."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolwise.data.files import Row, drop_nulls
from toolwise.data.row_layout import KNOWN_COLUMNS, PLAIN, RowLayout
from toolwise.data.rows import read_task
from toolwise.errors import DataError, ToolwiseError
from toolwise.types import Task


def tasks_to_jsonl(tasks: Sequence[Task], what: str, layout: RowLayout = PLAIN) -> str:
    """The tasks as JSONL for `load_tasks` with this layout; raises `DataError` for the first that JSON cannot
    represent."""
    return "".join(
        f"{json.dumps(task_to_row(task, what, number, layout), ensure_ascii=False)}\n"
        for number, task in enumerate(tasks)
    )


def task_to_row(task: Task, what: str, number: int, layout: RowLayout = PLAIN) -> Row:
    """One task as a row. Reading drops nulls under keys, so a dictionary with nulls is stored as JSON text."""
    try:
        expected = _task_as_json(task)
        for as_text in (False, True):
            row = _row(expected, as_text, layout)
            again = read_task(Path(what), number, json.loads(json.dumps(row)), {}, layout=layout)
            if _task_as_json(again) == expected:
                return row
    except (ValueError, TypeError, ToolwiseError, RecursionError) as fault:
        raise DataError(f"{what}: row {number} cannot be written as JSON: {' '.join(str(fault).split())}") from None
    raise DataError(f"{what}: row {number} ({task.task_id}) changes when it is read back from JSON")


def _task_as_json(task: Task) -> dict[str, Any]:
    """The task after a JSON round trip; NaN and objects that are not JSON raise an error."""
    fields: dict[str, Any] = json.loads(json.dumps(task.model_dump(), allow_nan=False))
    return fields | {"extra_info": drop_nulls(fields["extra_info"])}  # rows never have nulls there


def _row(fields: dict[str, Any], as_text: bool, layout: RowLayout) -> Row:
    row: Row = dict.fromkeys(layout.columns)  # a field without a value is there all the same: it is not looked for
    row |= {name: value for name, value in fields.items() if value not in (None, "", {}) and name != "reward_kwargs"}
    arguments = fields["reward_kwargs"]
    if as_text:
        for name in ("tools_kwargs", "interaction_kwargs", "extra_info"):
            row |= {name: json.dumps(row[name])} if name in row else {}
        return row | ({"evaluation_criteria": json.dumps(arguments)} if arguments else {})
    clashes = any(name in KNOWN_COLUMNS or name in layout.columns.values() for name in arguments)
    return {**row, **({"evaluation_criteria": arguments} if clashes else arguments)}
