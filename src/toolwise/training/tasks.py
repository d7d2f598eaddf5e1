"""Loads a run's tasks, attaches route labels, removes held-out tools, and checks tasks against the run's tools."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from toolwise.config.data import TaskSources
from toolwise.config.schema import RunConfig
from toolwise.data import open_tasks
from toolwise.data.cache import CACHE_FOLDER
from toolwise.data.row_layout import PLAIN, RowLayout
from toolwise.data.rows import tasks_from_rows
from toolwise.data.task_set import TaskSet, change_tasks, filter_tasks
from toolwise.errors import ConfigError
from toolwise.tools.base import BaseTool
from toolwise.tools.catalog import check_task_arguments
from toolwise.training.startup import announce
from toolwise.types import Task

log = logging.getLogger("toolwise")


def load_split(config: RunConfig, which: Literal["train", "val"]) -> Sequence[Task]:
    data = config.data
    if which == "train" and data.train is None:
        raise ConfigError("data.train is missing: name a Parquet or JSONL file of tasks")
    sources, limit = (data.train, data.limit) if which == "train" else (data.val, data.val_limit)
    if sources is None:
        return []
    return open_tasks(sources, limit=limit, cache=data.cache, layout=RowLayout.of(data), progress=announce)


def named_files(tasks: Any) -> TaskSources | None:
    """The files or globs that an argument names; None for rows and tasks."""
    if isinstance(tasks, str | Path):
        return Path(tasks)
    if isinstance(tasks, list | tuple) and tasks and all(isinstance(item, str | Path) for item in tasks):
        return [Path(item) for item in tasks]
    return None


def read_given_tasks(tasks: Any, source: str, cache: Path | None, layout: RowLayout = PLAIN) -> Sequence[Task] | None:
    """The tasks of files or of rows given in Python; `cache` is for converted files."""
    if tasks is None:
        return None
    if isinstance(tasks, TaskSet):  # of tasks, not of rows
        if not layout.system_prompt:
            return tasks
        return change_tasks(tasks, lambda task: layout.add_system_prompt(Path(source), 0, task), keeps_profiles=True)
    if (files := named_files(tasks)) is not None:
        return open_tasks(files, cache=cache, layout=layout, progress=announce)
    loaded = tasks_from_rows(Path(source), tasks, layout=layout)
    if not loaded:
        raise ConfigError(f"{source} is empty: pass at least one task")
    return loaded


def cache_folder(config: RunConfig, run: Path) -> Path:
    """The folder for converted task files, by default beside the run's."""
    return config.data.cache or run.parent / CACHE_FOLDER


def with_cache(config: RunConfig, cache: Path) -> RunConfig:
    """The configuration with a folder for converted task files."""
    return config.model_copy(update={"data": config.data.model_copy(update={"cache": cache})})


def attach_labels(config: RunConfig, tasks: Sequence[Task]) -> Sequence[Task]:
    """Join the tasks with the labels in `router.labels`, if set."""
    if config.router.labels is None:
        return tasks
    from toolwise.routing.labels.label_files import join_labels, read_labels

    joined, description = join_labels(tasks, read_labels(config.router.labels, any_name=config.router.own_routes))
    log.info("%s: %s", config.router.labels, description)
    return joined


def without_held_out_tools(
    tasks: Sequence[Task], tools: dict[str, BaseTool], held_out: Sequence[str]
) -> Sequence[Task]:
    """The tasks to train on: those that name a held-out tool are dropped, and no task is offered one."""
    check_held_out_tools(tools, held_out)
    if not held_out:
        return tasks
    remaining = filter_tasks(tasks, lambda task: set(held_out).isdisjoint(task.tools or ()))
    if len(remaining) < len(tasks):
        log.warning(
            "%d of %d training tasks name a held-out tool and are dropped", len(tasks) - len(remaining), len(tasks)
        )
    offered = {"tools": [name for name in tools if name not in held_out]}
    return change_tasks(
        remaining,
        lambda task: task if task.tools is not None else task.model_copy(update=offered),
        keeps_profiles=True,
    )


def check_held_out_tools(tools: dict[str, BaseTool], held_out: Sequence[str]) -> None:
    for name in (name for name in held_out if name not in tools):
        available = ", ".join(tools) or "none"
        raise ConfigError(f"multi_turn.held_out_tools names {name!r}, but the run's tools are: {available}")


def check_task_tools(task: Task, tools: dict[str, BaseTool], *, env: str) -> None:
    for name in (name for name in task.tools or () if name not in tools):
        available = ", ".join(tools) or "none"
        raise ConfigError(
            f"task {task.task_id} needs the tool {name!r}, but the run's tools are: {available}; add it to `tools`"
        )
    check_task_arguments(task, tools, env_has_tools=env != "tools")
