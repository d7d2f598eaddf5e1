"""Profiles of tasks: what the checks before the first step read of a task, so that they read one task per profile."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable
from typing import Any

from toolwise.data.rlla_rows import TOOL_ENTRY
from toolwise.types import Task


def profile_of(task: Task) -> Hashable:
    """Equal for tasks of one data source that the checks before the first step cannot tell apart.

    It has the names of a task's tools, arguments and columns, not their values, and the tools in its system messages.
    """
    return (
        None if task.tools is None else tuple(task.tools),
        _argument_names(task.tools_kwargs) if task.tools_kwargs else (),
        task.ground_truth is None,
        (task.data_source, bool(task.ability)),
        tuple((name, value is None) for name, value in task.reward_kwargs.items()),
        tuple(task.extra_info),
        _digest(task.extra_info["tool_families"]) if "tool_families" in task.extra_info else "",
        _described_tools(task),
    )


def _argument_names(tools_kwargs: dict[str, dict[str, dict[str, Any]]]) -> Hashable:
    return tuple(
        (tool, tuple((phase, tuple(arguments)) for phase, arguments in phases.items()))
        for tool, phases in tools_kwargs.items()
    )


def _described_tools(task: Task) -> str:
    texts = [m.content or "" for m in task.prompt if m.role in ("system", "developer")]
    entries = [entry[:2] for text in texts if "Name: " in text for entry in TOOL_ENTRY.findall(text)]
    return _digest(entries) if entries else ""


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=12).hexdigest()
