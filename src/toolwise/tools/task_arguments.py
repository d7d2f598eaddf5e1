"""What a task gives to function tools (its `tools_kwargs`), checked before a run begins."""

from __future__ import annotations

from collections.abc import Mapping

from toolwise.errors import DataError, ToolwiseError
from toolwise.tools.base import BaseTool
from toolwise.tools.function import FunctionTool
from toolwise.types import Task

_TAKEN = ("create_kwargs", "execute_kwargs")


def check_task_arguments(task: Task, tools: Mapping[str, BaseTool]) -> None:
    """Refuses arguments that a function does not take; a class of tools says itself what it takes."""
    for name, given in task.tools_kwargs.items():
        tool = tools.get(name)
        if not isinstance(tool, FunctionTool):
            continue
        where = f"task {task.task_id}: tools_kwargs.{name}"
        for part in given:
            if given[part] and part not in _TAKEN:
                raise DataError(f"{where}.{part}: a function has no such step; it takes {' and '.join(_TAKEN)}")
        try:
            tool.check_task_arguments({key: value for part in _TAKEN for key, value in (given.get(part) or {}).items()})
        except ToolwiseError as fault:
            raise DataError(f"{where}: {fault}") from None
