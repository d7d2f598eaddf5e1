"""The built-in environments by name, and factories that build one environment per episode from a run's `env`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from toolwise.config.components import check_options
from toolwise.config.imports import did_you_mean, load_reference
from toolwise.envs.base import BaseEnv
from toolwise.envs.gsm8k import Gsm8kEnv
from toolwise.envs.gymnasium import GymnasiumEnv, check_registered
from toolwise.envs.interactions import BaseInteraction, FunctionInteraction, InteractiveEnv, ScriptedInteraction
from toolwise.envs.methods_env import MethodsEnv, choose_methods
from toolwise.envs.tool_env import ToolEnv
from toolwise.errors import ConfigError, DataError
from toolwise.serialization.json_text import load_json
from toolwise.tools.base import BaseTool
from toolwise.tools.builtin.gsm8k import Gsm8kTool
from toolwise.tools.catalog import label_of
from toolwise.types import Task

EnvFactory = Callable[[Task], BaseEnv]
EnvSpec = str | Callable[..., Any]
InteractionFactory = Callable[[], BaseInteraction]
Options = dict[str, Any]

ENVS: dict[str, Callable[..., BaseEnv]] = {"tools": ToolEnv, "gsm8k": Gsm8kEnv.from_task}
INTERACTIONS: dict[str, Callable[..., BaseInteraction]] = {"scripted": ScriptedInteraction}
GYMNASIUM_PREFIX = "gymnasium:"
# Options that are functions, given by reference in a configuration.
_FUNCTION_OPTIONS = ("format_observation", "parse_action", "state_of")


def build_env_factory(
    env: str | Callable[..., Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    tools: Mapping[str, BaseTool] | None = None,
    interaction: str | Callable[..., Any] | None = None,
    interaction_kwargs: Mapping[str, Any] | None = None,
    max_user_turns: int = 10,
    defaults: Mapping[str, Any] | None = None,
) -> EnvFactory:
    """Return a function that builds a new environment for a task.

    `env` is a built-in name, `gymnasium:ID`, a reference (`package.module:Class`, `path/to/file.py:Class`), a class or
    a function. It receives `task` and `tools` if it has such parameters; a class that is not a `BaseEnv` becomes a
    `MethodsEnv`, whose tools are its public methods. A task's `extra_info.env_kwargs` override `kwargs`. `interaction`
    adds a simulated user. `defaults` are settings of the run, such as `tool_timeout_s`, for environments that take
    them.
    """
    make = _env_factory(env, dict(kwargs or {}), dict(tools or {}), dict(defaults or {}))
    if not interaction:
        return make
    make_user = build_interaction_factory(interaction, interaction_kwargs)

    def with_user(task: Task) -> BaseEnv:
        return InteractiveEnv(make(task), make_user(), task, max_user_turns=max_user_turns)

    return with_user


def build_interaction_factory(
    interaction: str | Callable[..., Any], kwargs: Mapping[str, Any] | None = None
) -> InteractionFactory:
    """Return a function that builds a new simulated user.

    `interaction` is a built-in name, a reference, a `BaseInteraction` class, a function that returns one (by its return
    annotation), or a function of the messages.
    """
    options = dict(kwargs or {})
    where = label_of(interaction)
    target = _resolve(interaction, INTERACTIONS, "interaction")
    if isinstance(target, BaseInteraction):
        raise ConfigError(f"interaction: {where} is an instance, but every episode needs a new one; give the class")
    if _is_interaction_factory(target):
        check_options(target, options, f"interaction: {where}", {})
        return functools.partial(target, **options)
    if not inspect.isroutine(target):
        raise ConfigError(f"interaction: {where} is neither a BaseInteraction nor a function of the messages")
    return functools.partial(FunctionInteraction, target, options)


def _env_factory(
    env: str | Callable[..., Any], options: Options, tools: dict[str, BaseTool], defaults: Options
) -> EnvFactory:
    where = label_of(env)
    if isinstance(env, str) and env.startswith(GYMNASIUM_PREFIX):
        world = env.removeprefix(GYMNASIUM_PREFIX)
        check_registered(world)
        target: Callable[..., Any] = functools.partial(GymnasiumEnv, world)
    else:
        target = _resolve(env, ENVS, "env")
    for key in _FUNCTION_OPTIONS:
        if isinstance(options.get(key), str):
            options[key] = load_reference(options[key], what=f"env: {key}")
    if isinstance(target, BaseEnv):
        raise ConfigError(f"env: {where} is an instance, but every episode needs a new one; give the class")
    if isinstance(target, type) and not issubclass(target, BaseEnv):
        choose_methods([target], options.get("methods"), options.get("exclude", ()))
        target = functools.partial(MethodsEnv, target)
    known: Options = {"tools": tools, "task": None}
    if env == "gsm8k":  # all episodes share one tool, which keeps their state separate
        known["tool"] = Gsm8kTool()
    check_options(target, options, f"env: {where}", known)
    parameters = inspect.signature(target).parameters
    provided = {key: value for key, value in {**defaults, **known}.items() if key in parameters}

    def make(task: Task) -> BaseEnv:
        task_options = _task_options(task)
        check_options(target, task_options, f"task {task.task_id}: env_kwargs", known)
        built = target(
            **{**provided, **({"task": task} if "task" in provided else {}), **_merge_options(options, task_options)}
        )
        if not isinstance(built, BaseEnv):
            raise ConfigError(f"env: {where} returned {built!r:.60}, which is not a BaseEnv")
        return built

    return make


def _merge_options(options: Options, task_options: Options) -> Options:
    """Override the run's options with a task's; tables are merged, everything else is replaced."""
    both = {
        k: {**options[k], **task_options[k]}
        for k in task_options
        if isinstance(options.get(k), dict) and isinstance(task_options[k], dict)
    }
    return {**options, **task_options, **both}


def _task_options(task: Task) -> Options:
    given = task.extra_info.get("env_kwargs") or {}
    options = load_json(given) if isinstance(given, str) else given  # JSON: for rows that do not fit one Parquet schema
    if not isinstance(options, dict):
        problem = "must be a table of options, or valid JSON of one"
        raise DataError(f"task {task.task_id}: extra_info.env_kwargs {problem}, got {given!r:.80}")
    return options


def _resolve(source: Any, table: Mapping[str, Callable[..., Any]], what: str) -> Any:
    if not isinstance(source, str):
        return source
    if source in table:
        return table[source]
    if ":" not in source:
        extra = f", {GYMNASIUM_PREFIX}ID" if what == "env" else ""
        hint = did_you_mean(source, table) or f"; use {', '.join(sorted(table))}{extra}, or module:name"
        raise ConfigError(f"{what}: there is no {source!r}{hint}")
    target = load_reference(source, what=what)
    if not callable(target) and not isinstance(target, BaseEnv | BaseInteraction):
        raise ConfigError(f"{what}: {source} is {target!r:.60}; give a class or a function")
    return target


def _is_interaction_factory(target: Any) -> bool:
    if isinstance(target, type):
        return issubclass(target, BaseInteraction)
    return_type = getattr(target, "__annotations__", {}).get("return")
    return "Interaction" in str(getattr(return_type, "__name__", return_type))
