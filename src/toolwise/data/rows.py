"""From rows of a file (the verl and RLLA layout) to `Task`s: where the flow begins and bad data is named."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from toolwise.data.files import Row, drop_nulls, read_rows, row_error
from toolwise.data.tokens import read_prompt_ids
from toolwise.errors import DataError
from toolwise.messages import Message
from toolwise.types import Task
from toolwise.untrusted.patterns import PatternError, compile_pattern

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
    }
)
"""Every other column is a keyword argument of the reward."""

TOOL_PHASES = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")
_RESERVED_ARGUMENTS = frozenset(
    {"messages", "ground_truth", "rollouts_messages", "ground_truths", "group_messages", "step"}
)
_LABEL_COLUMNS = ("router_target_action", "tool_families")
"""Columns that `toolwise data label` adds: they go where a sidecar's labels go, into `extra_info`."""
_TASK_OPTIONS = frozenset({"tools", "tools_kwargs", "interaction_kwargs", "need_tools_kwargs"})


def load_tasks(path: str | Path, *, limit: int | None = None) -> list[Task]:
    """The tasks of a Parquet, JSONL or JSON file, in its order; the first bad row is a `DataError`."""
    path = Path(path)
    rows_by_id: dict[str, int] = {}
    tasks = []
    for number, row in enumerate(read_rows(path, limit=limit)):
        task = read_task(path, number, row, rows_by_id)
        rows_by_id[task.task_id] = number
        tasks.append(task)
    return tasks


def read_task(path: Path, number: int, row: Row, rows_by_id: Mapping[str, int]) -> Task:
    """The task in one row. `path` and `number` serve its id and errors, `rows_by_id` maps ids to earlier rows."""
    try:
        return _RowReader(path, number, row).task(rows_by_id)
    except RecursionError:
        raise row_error(path, number, "(whole row)", "nested too deeply to be read; flatten it") from None


class _RowReader:
    """One row on its way to a task; holds what an error must name."""

    def __init__(self, path: Path, number: int, row: Row) -> None:
        self.path = path
        self.number = number
        without_nan = {key: self.without_nan(key, value) for key, value in row.items()}
        self.row = {key: _without_nulls(key, value) for key, value in without_nan.items() if value is not None}
        self.extra = drop_nulls(self.parse_object(self.row.get("extra_info"), "extra_info"))
        self.extra |= {name: self.row[name] for name in _LABEL_COLUMNS if name in self.row}
        if isinstance(self.extra.get("tool_families"), str):
            self.extra["tool_families"] = self.parse_object(self.extra["tool_families"], "tool_families")
        self.reward_model = self.parse_object(self.row.get("reward_model"), "reward_model")

    def without_nan(self, field: str, value: Any) -> Any:
        """NaN, which many programs write for a missing number, is a null, as it is in the files that a run writes."""
        if isinstance(value, float) and not math.isfinite(value):
            if math.isnan(value):
                return None
            raise self.error(field, f"is {value}, which JSON does not have; write a finite number or leave it out")
        if isinstance(value, list):
            return [self.without_nan(field, item) for item in value]
        if isinstance(value, dict):
            return {key: self.without_nan(field, item) for key, item in value.items()}
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
            raise self.error(*_first_error(error)) from error

    def task_option(self, name: str) -> tuple[Any, str]:
        """A value that stands in `extra_info` or in a column of its own, and where it stood."""
        if name in self.extra:
            return self.extra[name], f"extra_info.{name}"
        return self.row.get(name), name

    def text(self, name: str, default: Any = "") -> str:
        value = self.row.get(name, default)
        if not isinstance(value, str):
            raise self.error(name, f"{value!r} is not a string; write it as one")
        return value

    def parse_object(self, value: Any, field: str) -> dict[str, Any]:
        """A dictionary, from one or from its JSON text (where a null is what the author wrote, and stays)."""
        if value is None:
            return {}
        if isinstance(value, str):
            value = self.parse_json(value, field)
        if not isinstance(value, dict):
            kind = type(value).__name__
            raise self.error(field, f"a {kind}, not an object; write an object or its JSON text")
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
            if "messages" in self.row:
                hint = "rename the column `messages` to it"
            raise self.error("prompt", f"missing or empty; {hint}")
        if isinstance(value, str):
            value = [{"role": "user", "content": value}]
        if not isinstance(value, list):
            raise self.error("prompt", f"a {type(value).__name__}; give a list of messages or a string")
        return [self.message(item, f"prompt[{i}]") for i, item in enumerate(value)]

    def message(self, value: Any, field: str) -> Message:
        if not isinstance(value, dict):
            raise self.error(field, f"a {type(value).__name__}, not a message; write {{role, content}}")
        try:
            message = Message.model_validate(value)
            (message.content or "").encode()
        except ValidationError as error:
            inner, problem = _first_error(error)
            raise self.error(f"{field}.{inner}".rstrip("."), problem) from error
        except UnicodeEncodeError as error:
            raise self.error(f"{field}.content", f"not valid Unicode ({error.reason}); correct the text") from error
        if message.content is None and not message.tool_calls:
            raise self.error(f"{field}.content", "missing; only an assistant message with tool_calls may leave it out")
        return message

    def ground_truth(self) -> Any:
        inner, column = self.reward_model.get("ground_truth"), self.row.get("ground_truth")
        if inner is not None and column is not None and inner != column:
            raise self.error("ground_truth", "differs from reward_model.ground_truth; keep one of the two")
        return column if inner is None else inner

    def tools_kwargs(self) -> dict[str, dict[str, dict[str, Any]]]:
        value, field = self.task_option("tools_kwargs")
        out: dict[str, dict[str, dict[str, Any]]] = {}
        for tool, given in self.parse_object(value, field).items():
            if given is None:
                continue
            phases = self.parse_object(given, f"{field}.{tool}")
            for phase in phases:
                if phase not in TOOL_PHASES:
                    near = difflib.get_close_matches(phase, TOOL_PHASES, n=1)
                    hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(TOOL_PHASES)}"
                    raise self.error(f"{field}.{tool}.{phase}", f"not a phase of a tool's life; {hint}")
            out[tool] = {name: self.parse_object(item, f"{field}.{tool}.{name}") for name, item in phases.items()}
        return out

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
        columns = {name: value for name, value in self.row.items() if name not in KNOWN_COLUMNS}
        criteria = self.parse_object(self.row.get("evaluation_criteria"), "evaluation_criteria")
        beside = {name: value for name, value in self.reward_model.items() if name not in ("ground_truth", "style")}
        out: dict[str, Any] = {}
        for prefix, given in (("", columns), ("evaluation_criteria.", criteria), ("reward_model.", beside)):
            for name, value in given.items():
                if name in _RESERVED_ARGUMENTS:
                    raise self.error(prefix + name, f"rewards are given their own `{name}`; rename it")
                if name in out:
                    raise self.error(prefix + name, "the row has another value of this name; rename one of the two")
                out[name] = value
        return out

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
            given = self.identifier(self.row["task_id"], "task_id")
            if given in rows_by_id:
                raise self.error("task_id", f"{given!r} is row {rows_by_id[given]}'s already; make each id unique")
            return given
        split = self.extra.get("split")
        prefix = f"{self.path.stem}/{split}" if split else self.path.stem
        if "index" in self.extra:
            made = f"{prefix}/{self.identifier(self.extra['index'], 'extra_info.index')}"
            if made not in rows_by_id:
                return made
        # Indexes default to 0 in many files. The first holder keeps its own, so ids do not depend on `limit`.
        made = f"{prefix}/row-{self.number}"
        while made in rows_by_id:  # an index may be any string, this one too
            made += "+"
        return made

    def identifier(self, value: Any, field: str) -> str:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
            raise self.error(field, f"{value!r:.80} is no id; give an integer or a string")
        return str(value)


def _without_nulls(column: str, value: Any) -> Any:
    """A column without nulls under its keys, which structs fill in; a ground truth is left alone."""
    if column == "ground_truth":
        return value
    if column == "reward_model" and isinstance(value, dict):
        return {key: _without_nulls(key, item) for key, item in value.items() if item is not None}
    return drop_nulls(value)


def _first_error(error: ValidationError) -> tuple[str, str]:
    """Where pydantic first objected, and why, in one line."""
    fault = error.errors()[0]
    given = f", got {fault['input']!r:.60}" if fault["type"] != "missing" else ""
    return ".".join(str(part) for part in fault["loc"]), f"{fault['msg']}{given}; correct it"
