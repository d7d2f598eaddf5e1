"""What a task gives to function tools (its `tools_kwargs`), checked before a run begins."""

from __future__ import annotations

from collections.abc import Mapping

from toolwise.config.imports import did_you_mean
from toolwise.errors import DataError, ToolwiseError
from toolwise.tools.base import BaseTool
from toolwise.tools.function import FunctionTool
from toolwise.types import Task

_KWARGS_KEYS = ("create_kwargs", "execute_kwargs")


def check_task_arguments(task: Task, tools: Mapping[str, BaseTool], *, env_has_tools: bool = False) -> None:
    """Refuses arguments for a tool that is not there, and those that a function does not take; a class of tools says
    itself what it takes.

    An environment with tools of its own (`env_has_tools`) may take arguments for them, and a run without any tools may
    use tasks that were written for a run with some.
    """
    for name, given in task.tools_kwargs.items():
        tool = tools.get(name)
        if tool is None and tools and not env_has_tools:
            hint = did_you_mean(name, tools) or f"; it has {', '.join(tools)}"
            raise DataError(f"task {task.task_id}: tools_kwargs.{name}: the run has no tool {name!r}{hint}")
        if not isinstance(tool, FunctionTool):
            continue
        where = f"task {task.task_id}: tools_kwargs.{name}"
        for part in given:
            if given[part] and part not in _KWARGS_KEYS:
                raise DataError(f"{where}.{part}: a function has no such step; it takes {' and '.join(_KWARGS_KEYS)}")
        try:
            tool.check_task_arguments(
                {key: value for part in _KWARGS_KEYS for key, value in (given.get(part) or {}).items()}
            )
        except ToolwiseError as fault:
            raise DataError(f"{where}: {fault}") from None
