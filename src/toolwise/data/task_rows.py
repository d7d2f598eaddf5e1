"""Tasks back into rows: the inverse of `read_task`, for tasks that were given in Python."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolwise.data.files import Row, drop_nulls
from toolwise.data.rows import KNOWN_COLUMNS, read_task
from toolwise.errors import DataError, ToolwiseError
from toolwise.types import Task


def tasks_to_jsonl(tasks: Sequence[Task], what: str) -> str:
    """The tasks as JSONL that `load_tasks` reads back; a `DataError` names the first that JSON cannot hold."""
    return "".join(
        f"{json.dumps(task_to_row(task, what, number), ensure_ascii=False)}\n" for number, task in enumerate(tasks)
    )


def task_to_row(task: Task, what: str, number: int) -> Row:
    """One task as a row. Nulls under a key are dropped from rows, so a table that has some is written as JSON text."""
    try:
        wanted = _task_as_json(task)
        for as_text in (False, True):
            row = _row(wanted, as_text)
            if _task_as_json(read_task(Path(what), number, json.loads(json.dumps(row)), {})) == wanted:
                return row
    except (ValueError, TypeError, ToolwiseError, RecursionError) as fault:
        raise DataError(f"{what}: row {number} cannot be written as JSON: {' '.join(str(fault).split())}") from None
    raise DataError(f"{what}: row {number} ({task.task_id}) is not the same when it is read back from JSON")


def _task_as_json(task: Task) -> dict[str, Any]:
    """As JSON would give it back; NaN and objects of other libraries are refused."""
    plain: dict[str, Any] = json.loads(json.dumps(task.model_dump(), allow_nan=False))
    return plain | {"extra_info": drop_nulls(plain["extra_info"])}  # rows never have any there


def _row(fields: dict[str, Any], as_text: bool) -> Row:
    row = {name: value for name, value in fields.items() if value not in (None, "", {}) and name != "reward_kwargs"}
    arguments = fields["reward_kwargs"]
    if as_text:
        for name in ("tools_kwargs", "interaction_kwargs", "extra_info"):
            row |= {name: json.dumps(row[name])} if name in row else {}
        return row | ({"evaluation_criteria": json.dumps(arguments)} if arguments else {})
    known = any(name in KNOWN_COLUMNS for name in arguments)
    return {**row, **({"evaluation_criteria": arguments} if known else arguments)}
