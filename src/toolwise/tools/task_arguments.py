"""Checks the arguments that a task passes to tools (`tools_kwargs`) before a run starts."""

from __future__ import annotations

from collections.abc import Mapping

from toolwise.config.imports import did_you_mean
from toolwise.errors import DataError, ToolwiseError
from toolwise.tools.base import BaseTool
from toolwise.tools.function import FunctionTool
from toolwise.types import Task

_KWARGS_KEYS = ("create_kwargs", "execute_kwargs")


def check_task_arguments(task: Task, tools: Mapping[str, BaseTool], *, env_has_tools: bool = False) -> None:
    """Reject arguments for unknown tools, and arguments that a function does not accept; tool classes check their own.

    An environment that defines tools (`env_has_tools`) may accept arguments for them, and a run without tools may use
    tasks written for a run with tools.
    """
    for name, sections in task.tools_kwargs.items():
        tool = tools.get(name)
        if tool is None and tools and not env_has_tools:
            hint = did_you_mean(name, tools) or f"; it has {', '.join(tools)}"
            raise DataError(f"task {task.task_id}: tools_kwargs.{name}: the run has no tool {name!r}{hint}")
        if not isinstance(tool, FunctionTool):
            continue
        where = f"task {task.task_id}: tools_kwargs.{name}"
        for section in sections:
            if sections[section] and section not in _KWARGS_KEYS:
                raise DataError(f"{where}.{section}: function tools accept only {' and '.join(_KWARGS_KEYS)}")
        try:
            tool.check_task_arguments(
                {key: value for section in _KWARGS_KEYS for key, value in (sections.get(section) or {}).items()}
            )
        except ToolwiseError as fault:
            raise DataError(f"{where}: {fault}") from None
