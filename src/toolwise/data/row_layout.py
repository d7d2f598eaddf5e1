"""What a run's settings say about its rows: which column holds which field, and the system message of the prompts."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from toolwise.config.data import DataConfig
from toolwise.data.files import Row, row_error
from toolwise.errors import ConfigError
from toolwise.messages import Message
from toolwise.types import Task

log = logging.getLogger("toolwise.data")

KNOWN_COLUMNS = frozenset(
    {
        "task_id",
        "prompt",
        "prompt_ids",
        "input_ids",
        "attention_mask",
        "position_ids",
        "data_source",
        "ability",
        "reward_model",
        "ground_truth",
        "extra_info",
        "tools",
        "tools_kwargs",
        "interaction_kwargs",
        "need_tools_kwargs",
        "evaluation_criteria",
        "termination_regex",
        "router_target_action",
        "tool_families",
        "router_labelled_by",
    }
)
"""Every other column is passed to the reward as a keyword argument."""


@dataclass(frozen=True)
class RowLayout:
    """Applying it twice is the same as once: rows that a run has recorded are in our own layout already."""

    columns: Mapping[str, str] = field(default_factory=dict)
    """Field -> the column that holds it."""
    system_prompt: str = ""

    def __post_init__(self) -> None:
        for name, column in self.columns.items():
            if name not in KNOWN_COLUMNS:
                matches = difflib.get_close_matches(name, KNOWN_COLUMNS, n=1)
                hint = f"did you mean {matches[0]}?" if matches else "write field = column, such as prompt = question"
                raise ConfigError(f"data.columns: there is no field {name!r}; {hint}")
            if column in KNOWN_COLUMNS and column != name:
                raise ConfigError(
                    f"data.columns.{name}: the column {column!r} is a field itself; rename it in the file"
                )

    @classmethod
    def of(cls, data: DataConfig) -> RowLayout:
        return cls(data.columns, data.system_prompt)

    @property
    def is_plain(self) -> bool:
        return not self.columns and not self.system_prompt

    def rename(self, path: Path, number: int, row: Row) -> Row:
        """The row with its columns under the names of their fields; a field's own column gives way to the one named."""
        if not self.columns:
            return row
        moved = {}
        for name, column in self.columns.items():
            if column in row:
                moved[name] = row[column]
            elif name not in row:
                problem = f"there is no column {column!r}, which data.columns names; {list_columns(row)}"
                raise row_error(path, number, name, problem)
            else:
                _warn_about_column(path, name, column)
        return {name: value for name, value in row.items() if name not in self.columns.values()} | moved

    def add_system_prompt(self, path: Path, number: int, task: Task) -> Task:
        """The task with the system message, unless its prompt begins with one."""
        if not self.system_prompt:
            return task
        if task.prompt_ids is not None:
            problem = "tokens cannot be given data.system_prompt; write it into them, or leave the setting out"
            raise row_error(path, number, "prompt_ids", problem)
        return task.model_copy(update={"prompt": with_system_prompt(task.prompt, self.system_prompt)})


def with_system_prompt(prompt: Sequence[Message], text: str) -> list[Message]:
    """The prompt with a system message, unless there is no text or it begins with one."""
    if not text or (prompt and prompt[0].role in ("system", "developer")):
        return list(prompt)
    return [Message(role="system", content=text), *prompt]


PLAIN = RowLayout()


@cache
def _warn_about_column(path: Path, name: str, column: str) -> None:
    """Once for each file: a misspelt column would be read from another one without a word."""
    problem = "%s: rows without the column %r, which data.columns names; their column %r is read instead"
    log.warning(problem, path, column, name)


def list_columns(row: Mapping[str, Any]) -> str:
    return f"the columns are: {_listed(row)}"


def _listed(names: Iterable[str], most: int = 20) -> str:
    shown = [f"{name!s:.60}" for name in names]
    rest = f" and {len(shown) - most} more" if len(shown) > most else ""
    return (", ".join(shown[:most]) or "none") + rest
