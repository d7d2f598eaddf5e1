"""Statistics of a task file, as numbers and as a table. Computing them checks every row before training."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from toolwise.data.files import row_error
from toolwise.data.rlla_rows import gold_calls, gold_kind, parse_tools
from toolwise.data.row_layout import PLAIN, RowLayout
from toolwise.data.sources import open_tasks
from toolwise.errors import DataError
from toolwise.terminal import escape_controls
from toolwise.types import Task

if TYPE_CHECKING:
    from rich.table import Table

_QUANTILES = {"min": 0.0, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "max": 1.0}
_MAX_TOOL_NAMES = 10
_COUNTS = ("data_sources", "abilities", "tool_names", "ground_truth_types", "missing")
"""Fields whose keys are names from the file, shown unchanged."""
_MISSABLE = (
    "prompt",
    "data_source",
    "ability",
    "reward_model.ground_truth",
    "extra_info.index",
    "extra_info.split",
)


def describe_tasks(path: str | Path, layout: RowLayout = PLAIN) -> dict[str, Any]:
    """Statistics of a task file, as JSON-ready values. A bad row raises the same `DataError` as loading it."""
    path = Path(path)
    with TemporaryDirectory(prefix="toolwise-stats-") as cache:  # a large file is read from a converted copy
        statistics = _Statistics(path)
        for number, task in enumerate(open_tasks(path, cache=Path(cache), layout=layout)):
            statistics.add(number, task)
    return statistics.describe()


class _Statistics:
    """Counts that grow task by task, so that the tasks need not be in memory."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, 0
        self.data_sources, self.abilities, self.tool_names, self.truth_types, self.missing, self.gold_kinds = (
            Counter[str]() for _ in range(6)
        )
        self.characters, self.tokens, self.tools, self.gold_calls = (array("q") for _ in range(4))

    def add(self, number: int, task: Task) -> None:
        self.rows += 1
        self.data_sources[task.data_source] += 1
        self.abilities[task.ability] += 1
        self.truth_types[type(task.ground_truth).__name__] += 1
        if task.prompt:
            self.characters.append(sum(len(m.content or "") for m in task.prompt))
        if task.prompt_ids is not None:
            self.tokens.append(len(task.prompt_ids))
        if (names := _tool_names(self.path, number, task)) is not None:
            self.tools.append(len(names))
            self.tool_names.update(names)
        if task.data_source == "rlla" and isinstance(task.ground_truth, str):
            self.gold_kinds[gold_kind(task.ground_truth)] += 1
            try:
                self.gold_calls.append(len(gold_calls(task.ground_truth)))
            except DataError as error:
                raise row_error(self.path, number, "reward_model.ground_truth", str(error)) from error
        self.missing.update(_missing(task))

    def describe(self) -> dict[str, Any]:
        return {
            "file": str(self.path),
            "rows": self.rows,
            "data_sources": _counts(self.data_sources),
            "abilities": _counts(self.abilities),
            "prompt_characters": _quantiles(self.characters),
            "prompt_tokens": _quantiles(self.tokens),
            "tools_per_row": _quantiles(self.tools),
            "rows_without_own_tools": self.rows - len(self.tools),
            "tool_names": dict(self.tool_names.most_common(_MAX_TOOL_NAMES)),
            "ground_truth_types": _counts(self.truth_types),
            "rlla": self._describe_rlla(),
            "missing": {field: self.missing[field] for field in _MISSABLE if self.missing[field]},
        }

    def _describe_rlla(self) -> dict[str, Any] | None:
        """Statistics of RLLA's gold answers: the share of each kind, and calls per row."""
        if not self.gold_calls:
            return None
        rows = len(self.gold_calls)
        nonzero = sum(count > 0 for count in self.gold_calls)
        return {
            "rows": rows,
            **{f"share_{kind.replace('-', '_')}": count / rows for kind, count in sorted(self.gold_kinds.items())},
            "calls_per_row": sum(self.gold_calls) / rows,
            "calls_per_tool_row": sum(self.gold_calls) / nonzero if nonzero else 0.0,
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


def _missing(task: Task) -> Iterator[str]:
    """The fields that the task's row lacks."""
    present = (
        task.prompt,
        task.data_source,
        task.ability,
        task.ground_truth is not None,
        "index" in task.extra_info,
        "split" in task.extra_info,
    )
    return (field for field, is_present in zip(_MISSABLE, present, strict=True) if not is_present)


def _counts(values: Counter[str]) -> dict[str, int]:
    return {name: count for name, count in values.most_common() if name}


def _quantiles(values: Sequence[int]) -> dict[str, float] | None:
    """Quantiles (each an actual value) and the mean; None if there are no values."""
    if not values:
        return None
    ordered = sorted(values)
    quantiles = {name: ordered[round(share * (len(ordered) - 1))] for name, share in _QUANTILES.items()}
    return {**quantiles, "mean": sum(ordered) / len(ordered)}
