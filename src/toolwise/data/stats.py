"""Statistics of a task file, as numbers and as a table. Computing them checks every row before training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolwise.data.files import row_error
from toolwise.data.rlla_rows import gold_calls, gold_kind, parse_tools
from toolwise.data.rows import load_tasks
from toolwise.errors import DataError
from toolwise.terminal import escape_controls
from toolwise.types import Task

if TYPE_CHECKING:
    from rich.table import Table

_QUANTILES = {"min": 0.0, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "max": 1.0}
_MAX_TOOL_NAMES = 10
_COUNTS = ("data_sources", "abilities", "tool_names", "ground_truth_types", "missing")
"""Fields whose keys are names from the file, shown unchanged."""


def describe_tasks(path: str | Path) -> dict[str, Any]:
    """Statistics of a task file, as JSON-ready values. A bad row raises the same `DataError` as loading it."""
    path = Path(path)
    tasks = load_tasks(path)
    tools = (_tool_names(path, number, task) for number, task in enumerate(tasks))
    listed = [names for names in tools if names is not None]
    return {
        "file": str(path),
        "rows": len(tasks),
        "data_sources": _counts(task.data_source for task in tasks if task.data_source),
        "abilities": _counts(task.ability for task in tasks if task.ability),
        "prompt_characters": _quantiles(
            [sum(len(m.content or "") for m in task.prompt) for task in tasks if task.prompt]
        ),
        "prompt_tokens": _quantiles([len(task.prompt_ids) for task in tasks if task.prompt_ids is not None]),
        "tools_per_row": _quantiles([len(names) for names in listed]),
        "rows_without_own_tools": len(tasks) - len(listed),
        "tool_names": dict(Counter(name for names in listed for name in names).most_common(_MAX_TOOL_NAMES)),
        "ground_truth_types": _counts(type(task.ground_truth).__name__ for task in tasks),
        "rlla": _describe_rlla(path, tasks),
        "missing": _missing(tasks),
    }


def stats_table(description: dict[str, Any]) -> Table:
    """The description as a table for a terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(escape_controls(description["file"])), show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in description.items():
        if name != "file" and value not in (None, {}):
            table.add_row(name.replace("_", " "), Text(escape_controls(_cell(name, value))))
    return table


def _cell(field: str, value: Any) -> str:
    if not isinstance(value, dict):
        return _number(field, value)
    if field in _COUNTS:
        return ", ".join(f"{name} ({count:,})" for name, count in value.items())
    return " · ".join(f"{name.replace('_', ' ')} {_number(name, item)}" for name, item in value.items())


def _number(name: str, value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2%}" if name.startswith("share_") else f"{value:,.2f}"
    return f"{value:,}"


def _tool_names(path: Path, number: int, task: Task) -> list[str] | None:
    """The tools that the row lists, or else those described in its system message; None if there are none."""
    if task.tools is not None:
        return task.tools
    system = "\n".join(message.content or "" for message in task.prompt if message.role == "system")
    try:
        return [entry.name for entry in parse_tools(system)] or None
    except DataError as error:
        raise row_error(path, number, "prompt", str(error)) from error


def _describe_rlla(path: Path, tasks: Sequence[Task]) -> dict[str, Any] | None:
    """Statistics of RLLA's gold answers: the share of each kind, and calls per row."""
    kinds: Counter[str] = Counter()
    calls = []
    for number, task in enumerate(tasks):
        if task.data_source != "rlla" or not isinstance(task.ground_truth, str):
            continue
        kinds[gold_kind(task.ground_truth)] += 1
        try:
            calls.append(len(gold_calls(task.ground_truth)))
        except DataError as error:
            raise row_error(path, number, "reward_model.ground_truth", str(error)) from error
    if not calls:
        return None
    nonzero = [count for count in calls if count]
    return {
        "rows": len(calls),
        **{f"share_{kind.replace('-', '_')}": count / len(calls) for kind, count in sorted(kinds.items())},
        "calls_per_row": sum(calls) / len(calls),
        "calls_per_tool_row": sum(nonzero) / len(nonzero) if nonzero else 0.0,
    }


def _missing(tasks: Sequence[Task]) -> dict[str, int]:
    """Maps each field that some row lacks to the number of rows without it."""
    counts = {
        "prompt": sum(not task.prompt for task in tasks),
        "data_source": sum(not task.data_source for task in tasks),
        "ability": sum(not task.ability for task in tasks),
        "reward_model.ground_truth": sum(task.ground_truth is None for task in tasks),
        "extra_info.index": sum("index" not in task.extra_info for task in tasks),
        "extra_info.split": sum("split" not in task.extra_info for task in tasks),
    }
    return {field: count for field, count in counts.items() if count}


def _counts(values: Iterable[str]) -> dict[str, int]:
    return dict(Counter(values).most_common())


def _quantiles(values: Sequence[int]) -> dict[str, float] | None:
    """Quantiles (each an actual value) and the mean; None if there are no values."""
    if not values:
        return None
    ordered = sorted(values)
    quantiles = {name: ordered[round(share * (len(ordered) - 1))] for name, share in _QUANTILES.items()}
    return {**quantiles, "mean": sum(ordered) / len(ordered)}
