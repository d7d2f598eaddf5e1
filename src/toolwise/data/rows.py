"""Converts rows in the verl and RLLA layout to `Task`s, with precise errors for bad data."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from toolwise.data.files import Row, drop_nulls, read_rows, row_error
from toolwise.data.prompts import as_unicode, first_error, is_unicode, read_message, read_prompt_ids
from toolwise.data.row_layout import KNOWN_COLUMNS, PLAIN, RowLayout, list_columns
from toolwise.errors import DataError
from toolwise.messages import Message
from toolwise.types import Task
from toolwise.untrusted.patterns import PatternError, compile_pattern

TOOL_PHASES = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")
_RESERVED_ARGUMENTS = frozenset(
    {"messages", "ground_truth", "rollouts_messages", "ground_truths", "group_messages", "step", "prompt_length"}
)
_LABEL_COLUMNS = ("router_target_action", "tool_families", "router_labelled_by")
"""Columns added by `toolwise data label`; like the labels of a sidecar file, they go into `extra_info`."""
_PROMPT_NAMES = ("messages", "question", "problem", "instruction", "query", "input", "text")
"""What other datasets call the prompt."""
_PLAIN_TYPES = frozenset({str, int, bool, type(None)})
_TASK_OPTIONS = frozenset({"tools", "tools_kwargs", "interaction_kwargs", "need_tools_kwargs"})


def load_tasks(path: str | Path, *, limit: int | None = None, layout: RowLayout = PLAIN) -> list[Task]:
    """Loads the tasks of a Parquet, JSONL or JSON file in order; raises `DataError` for the first bad row."""
    return tasks_from_rows(Path(path), read_rows(path, limit=limit), layout=layout)


def tasks_from_rows(path: Path, rows: Iterable[Any], *, name: str = "", layout: RowLayout = PLAIN) -> list[Task]:
    """`rows` are tasks, which have no columns, or dictionaries. `path` is for errors and, without a `name`, for ids."""
    tasks: list[Task] = []
    rows_by_id: dict[str, int] = {}
    for number, row in enumerate(rows):
        if isinstance(row, Task):
            task = layout.add_system_prompt(path, number, row)
        elif not isinstance(row, Mapping):
            problem = f"a {type(row).__name__} is no dictionary of columns"
            hint = "give rows.to_dict('records')" if hasattr(rows, "to_dict") else 'write {"prompt": …}'
            raise row_error(path, number, "(whole row)", f"{problem}; {hint}")
        else:
            task = read_task(path, number, dict(row), rows_by_id, name=name, layout=layout)
        rows_by_id[task.task_id] = number
        tasks.append(task)
    return tasks


def read_task(
    path: Path,
    number: int,
    row: Row,
    rows_by_id: Mapping[str, int],
    *,
    name: str = "",
    layout: RowLayout = PLAIN,
) -> Task:
    """Reads one row. `path` and `number` are for its id and errors; `rows_by_id` maps ids to earlier rows; ids begin
    with `name`, by default the file's."""
    row = layout.rename(path, number, row)
    try:
        task = _RowReader(path, number, row, name or as_unicode(path.stem)).task(rows_by_id)
    except RecursionError:
        raise row_error(path, number, "(whole row)", "nested too deeply to be read; flatten it") from None
    if not is_unicode(task.task_id):
        raise row_error(path, number, "task_id", "not valid Unicode (lone surrogate); correct the text")
    return layout.add_system_prompt(path, number, task)


def has_own_id(row: Mapping[str, Any]) -> bool:
    """Whether the row has a `task_id`; NaN is read as null."""
    value = row.get("task_id")
    return value is not None and value == value


def id_prefix(name: str, extra_info: Mapping[str, Any]) -> str:
    """What the id of a row without a `task_id` begins with: the file's name and the row's split."""
    split = extra_info.get("split")
    return f"{name}/{split}" if split else name


class _RowReader:
    """Converts one row to a task, and keeps what error messages need."""

    def __init__(self, path: Path, number: int, row: Row, name: str) -> None:
        self.path, self.name = path, name
        self.number = number
        self.row = {
            key: value
            for key, value in ((key, self.clean_column(key, value)) for key, value in row.items())
            if value is not None
        }
        extra = self.row.get("extra_info")
        parsed = self.parse_object(extra, "extra_info")
        self.extra = drop_nulls(parsed) if isinstance(extra, str) else dict(parsed)
        self.extra |= {name: self.row[name] for name in _LABEL_COLUMNS if name in self.row}
        if isinstance(self.extra.get("tool_families"), str):
            self.extra["tool_families"] = self.parse_object(self.extra["tool_families"], "tool_families")
        self.reward_model = self.parse_object(self.row.get("reward_model"), "reward_model")

    def clean_column(self, column: str, value: Any, field: str = "") -> Any:
        """Drops nulls under keys, which Parquet structs fill in; a ground truth keeps them."""
        field = field or column
        if column == "reward_model" and isinstance(value, dict):
            inner = ((key, self.clean_column(key, item, field)) for key, item in value.items())
            return {key: item for key, item in inner if item is not None}
        return self.clean(field, value, keep_nulls=column == "ground_truth")

    def clean(self, field: str, value: Any, *, keep_nulls: bool = False) -> Any:
        """Replaces NaN, which many programs write for a missing number, by null, and drops nulls under keys."""
        if type(value) in _PLAIN_TYPES:  # most values: tested first, as every value of every row passes here
            return value
        if isinstance(value, float) and not math.isfinite(value):
            if math.isnan(value):
                return None
            raise self.error(field, f"is {value}, which is not valid JSON; write a finite number or leave it out")
        if isinstance(value, list):
            return [self.clean(field, item, keep_nulls=keep_nulls) for item in value]
        if isinstance(value, dict):
            cleaned = {key: self.clean(field, item, keep_nulls=keep_nulls) for key, item in value.items()}
            return cleaned if keep_nulls else {key: item for key, item in cleaned.items() if item is not None}
        return value

    def error(self, field: str, problem: str) -> DataError:
        return row_error(self.path, self.number, field, problem)

    def task(self, rows_by_id: Mapping[str, int]) -> Task:
        prompt_ids = read_prompt_ids(self.row, self.error)
        tools_kwargs = self.tools_kwargs()
        try:
            return Task(
                task_id=self.task_id(rows_by_id),
                prompt=self.prompt(required=prompt_ids is None),
                prompt_ids=prompt_ids,
                ground_truth=self.ground_truth(),
                data_source=self.text("data_source", self.extra.get("data_source", "")),
                ability=self.text("ability"),
                tools=self.tools(tools_kwargs),
                tools_kwargs=tools_kwargs,
                interaction_kwargs=self.parse_object(*self.task_option("interaction_kwargs")),
                reward_kwargs=self.reward_kwargs(),
                extra_info={key: value for key, value in self.extra.items() if key not in _TASK_OPTIONS},
                termination_regex=self.termination_regex(),
            )
        except ValidationError as error:
            raise self.error(*first_error(error)) from error

    def task_option(self, name: str) -> tuple[Any, str]:
        """A value from `extra_info` or from its own column, and the name of that field."""
        if name in self.extra:
            return self.extra[name], f"extra_info.{name}"
        return self.row.get(name), name

    def text(self, name: str, default: Any = "") -> str:
        value = self.row.get(name, default)
        if not isinstance(value, str):
            raise self.error(name, f"{value!r} is not a string; write it as one")
        return value

    def parse_object(self, value: Any, field: str) -> dict[str, Any]:
        """A dictionary, given as such or as JSON text. Nulls in JSON text are intentional and stay."""
        if value is None:
            return {}
        if isinstance(value, str):
            value = self.parse_json(value, field)
        if not isinstance(value, dict):
            raise self.error(field, f"a {type(value).__name__}, not an object; write an object or its JSON text")
        return value

    def parse_json(self, text: str, field: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self.error(field, f"text that is not JSON ({error}); write JSON text or the value itself") from error

    def prompt(self, *, required: bool) -> list[Message]:
        value = self.row.get("prompt")
        if value is None and not required:
            return []
        if value is None or value in ("", []):
            hint = "give messages, a string or prompt_ids"
            if "prompt" not in self.row:
                likely = next((name for name in _PROMPT_NAMES if name in self.row), "question")
                hint += f', or name its column: data.columns = {{ prompt = "{likely}" }}; {list_columns(self.row)}'
            raise self.error("prompt", f"missing or empty; {hint}")
        if isinstance(value, str):
            value = [{"role": "user", "content": value}]
        if not isinstance(value, list):
            raise self.error("prompt", f"a {type(value).__name__}; give a list of messages or a string")
        return [read_message(self.error, item, f"prompt[{i}]") for i, item in enumerate(value)]

    def ground_truth(self) -> Any:
        inner, column = self.reward_model.get("ground_truth"), self.row.get("ground_truth")
        if inner is not None and column is not None and inner != column:
            raise self.error("ground_truth", "differs from reward_model.ground_truth; keep one of the two")
        return column if inner is None else inner

    def tools_kwargs(self) -> dict[str, dict[str, dict[str, Any]]]:
        value, field = self.task_option("tools_kwargs")
        result: dict[str, dict[str, dict[str, Any]]] = {}
        tools = self.parse_object(value, field)
        for tool, settings in ((tool, settings) for tool, settings in tools.items() if settings is not None):
            phases = self.parse_object(settings, f"{field}.{tool}")
            for phase in (name for name in phases if name not in TOOL_PHASES):
                matches = difflib.get_close_matches(phase, TOOL_PHASES, n=1)
                hint = f"did you mean {matches[0]}?" if matches else f"use one of {', '.join(TOOL_PHASES)}"
                raise self.error(f"{field}.{tool}.{phase}", f"not a phase of the tool life cycle; {hint}")
            result[tool] = {name: self.parse_object(item, f"{field}.{tool}.{name}") for name, item in phases.items()}
        return result

    def tools(self, tools_kwargs: dict[str, dict[str, dict[str, Any]]]) -> list[str] | None:
        field = "tools" if "tools" in self.row else "extra_info.tools"
        value = self.row.get("tools", self.extra.get("tools"))
        if value is None:
            return self.tools_by_kwargs(tools_kwargs)
        if isinstance(value, str):
            value = self.parse_json(value, field)
        if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
            raise self.error(field, f'{value!r:.80} is not a list of tool names; write names such as ["calculator"]')
        if len(set(value)) != len(value):
            raise self.error(field, f"{value!r:.80} names a tool twice; name each once")
        return value

    def tools_by_kwargs(self, tools_kwargs: dict[str, dict[str, dict[str, Any]]]) -> list[str] | None:
        needed, field = self.task_option("need_tools_kwargs")
        if needed not in (None, True, False):
            raise self.error(field, f"{needed!r} is not true or false; write one of these")
        if not needed:
            return None
        if not tools_kwargs:
            raise self.error(field, "true, but tools_kwargs names no tool; fill tools_kwargs, or give `tools`")
        return list(tools_kwargs)

    def reward_kwargs(self) -> dict[str, Any]:
        criteria = self.parse_object(self.row.get("evaluation_criteria"), "evaluation_criteria")
        result: dict[str, Any] = {}
        for prefix, fields, known in (
            ("", self.row, KNOWN_COLUMNS),
            ("evaluation_criteria.", criteria, ()),
            ("reward_model.", self.reward_model, ("ground_truth", "style")),
        ):
            for name in (name for name in fields if name not in known):
                if name in _RESERVED_ARGUMENTS:
                    raise self.error(prefix + name, f"rewards already have an argument `{name}`; rename it")
                if name in result:
                    raise self.error(prefix + name, "the row has another value with this name; rename one of them")
                result[name] = fields[name]
        return result

    def termination_regex(self) -> str | None:
        pattern = self.row.get("termination_regex")
        if pattern is None:
            return None
        if not isinstance(pattern, str):
            raise self.error("termination_regex", f"a {type(pattern).__name__}; give a regular expression as a string")
        try:
            compile_pattern(pattern)
        except PatternError as error:
            raise self.error("termination_regex", f"not a usable regular expression ({error}); correct it") from error
        return pattern

    def task_id(self, rows_by_id: Mapping[str, int]) -> str:
        if "task_id" in self.row:
            task_id = self.identifier(self.row["task_id"], "task_id")
            if task_id in rows_by_id:
                raise self.error(
                    "task_id", f"{task_id!r} is already the id of row {rows_by_id[task_id]}; make each id unique"
                )
            return task_id
        prefix = id_prefix(self.name, self.extra)
        if "index" in self.extra:
            candidate = f"{prefix}/{self.identifier(self.extra['index'], 'extra_info.index')}"
            if candidate not in rows_by_id:
                return candidate
        # The index is 0 for all rows of many files. The first row with an index keeps it, so ids do not depend on
        # `limit`.
        candidate = f"{prefix}/row-{self.number}"
        while candidate in rows_by_id:  # an index may be any string, including this one
            candidate += "+"
        return candidate

    def identifier(self, value: Any, field: str) -> str:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
            raise self.error(field, f"{value!r:.80} is not an id; give an integer or a string")
        return str(value)
