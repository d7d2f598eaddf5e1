"""The environments that Toolwise brings, by name, and how a run's `env` becomes one environment an episode."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from toolwise.config.imports import did_you_mean, load_reference
from toolwise.envs.base import BaseEnv
from toolwise.envs.gsm8k import Gsm8kEnv
from toolwise.envs.gymnasium import GymnasiumEnv, check_world
from toolwise.envs.interactions import BaseInteraction, FunctionInteraction, ScriptedInteraction
from toolwise.envs.interactive_env import InteractiveEnv
from toolwise.envs.methods_env import MethodsEnv, choose_methods
from toolwise.envs.tool_env import ToolEnv
from toolwise.errors import ConfigError, DataError
from toolwise.tools.base import BaseTool
from toolwise.tools.builtin.gsm8k import Gsm8kTool
from toolwise.types import Task

EnvFactory = Callable[[Task], BaseEnv]
InteractionFactory = Callable[[], BaseInteraction]
Options = dict[str, Any]

ENVS: dict[str, Callable[..., BaseEnv]] = {"tools": ToolEnv, "gsm8k": Gsm8kEnv.from_task}
INTERACTIONS: dict[str, Callable[..., BaseInteraction]] = {"scripted": ScriptedInteraction}
GYMNASIUM_PREFIX = "gymnasium:"
_FUNCTION_OPTIONS = ("format_observation", "parse_action", "state_of")
"""Options that a configuration gives as references."""


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
    """From a task to a fresh environment.

    `env` is a built-in's name, `gymnasium:ID`, a reference (`package.module:Class`, `path/to/file.py:Class`), a class
    or a function. What it takes of `task` and `tools` it is given; a class that is no `BaseEnv` becomes one of its
    public methods. A task's `extra_info.env_kwargs` add to `kwargs`. With `interaction`, a simulated user joins in.
    `defaults` are settings of the whole run, such as `tool_timeout_s`, for environments that take them.
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
    """A fresh user each time: of a built-in's name, a reference, a `BaseInteraction` class, a function that makes one
    (its result is annotated so), or a function of the messages."""
    options = dict(kwargs or {})
    where = _label(interaction)
    target = _resolve(interaction, INTERACTIONS, "interaction")
    if isinstance(target, BaseInteraction):
        raise ConfigError(f"interaction: {where} is one user, and every episode needs its own; name the class")
    if _is_interaction_factory(target):
        check_options(target, options, f"interaction: {where}", {})
        return functools.partial(target, **options)
    if not inspect.isroutine(target):
        raise ConfigError(f"interaction: {where} is no BaseInteraction and no function of the messages")
    bound = functools.partial(target, **options)
    functools.update_wrapper(bound, target)
    return lambda: FunctionInteraction(bound if options else target)


def _env_factory(
    env: str | Callable[..., Any], options: Options, tools: dict[str, BaseTool], defaults: Options
) -> EnvFactory:
    where = _label(env)
    if isinstance(env, str) and env.startswith(GYMNASIUM_PREFIX):
        world = env.removeprefix(GYMNASIUM_PREFIX)
        check_world(world)
        target: Callable[..., Any] = functools.partial(GymnasiumEnv, world)
    else:
        target = _resolve(env, ENVS, "env")
    options = {key: _load_function(key, value) for key, value in options.items()}
    if isinstance(target, BaseEnv):
        raise ConfigError(f"env: {where} is one environment, and every episode needs its own; name the class")
    if isinstance(target, type) and not issubclass(target, BaseEnv):
        choose_methods([target], options.get("methods"), options.get("exclude", ()))
        target = functools.partial(MethodsEnv, target)
    known: Options = {"tools": tools, "task": None}
    if env == "gsm8k":  # one tool for all episodes: it keeps them apart by itself
        known["tool"] = Gsm8kTool()
    check_options(target, options, f"env: {where}", known)
    parameters = inspect.signature(target).parameters
    taken = {key: value for key, value in {**defaults, **known}.items() if key in parameters}

    def make(task: Task) -> BaseEnv:
        own = _task_options(task)
        check_options(target, own, f"task {task.task_id}: env_kwargs", known)
        made = target(**{**taken, **({"task": task} if "task" in taken else {}), **_merge_options(options, own)})
        if not isinstance(made, BaseEnv):
            raise ConfigError(f"env: {where} made {made!r:.60}, which is no BaseEnv")
        return made

    return make


def check_options(target: Callable[..., Any], options: Mapping[str, Any], where: str, given: Mapping[str, Any]) -> None:
    """Refuses options that `target` does not take, and those it is given anyway."""
    parameters = inspect.signature(target).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known = [name for name in parameters if name not in given]
    for key in options:
        if key in given or (key not in known and not takes_all):
            hint = did_you_mean(key, known) or f"; it has {', '.join(known) or 'none'}"
            raise ConfigError(f"{where} has no option {key!r}{hint}")


def _merge_options(options: Options, own: Options) -> Options:
    """A task's options over the run's; tables of options are merged, all else is replaced."""
    both = {k: {**options[k], **own[k]} for k in own if isinstance(options.get(k), dict) and isinstance(own[k], dict)}
    return {**options, **own, **both}


def _task_options(task: Task) -> Options:
    given = task.extra_info.get("env_kwargs") or {}
    if isinstance(given, str):  # rows that differ too much for one Parquet schema write JSON
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise DataError(f"task {task.task_id}: extra_info.env_kwargs is no JSON: {given!r:.80}") from None
    if not isinstance(given, dict):
        raise DataError(f"task {task.task_id}: extra_info.env_kwargs must be a table of options, got {given!r:.80}")
    return given


def _resolve(named: Any, table: Mapping[str, Callable[..., Any]], what: str) -> Any:
    if not isinstance(named, str):
        return named
    if named in table:
        return table[named]
    if ":" not in named:
        more = f", {GYMNASIUM_PREFIX}ID" if what == "env" else ""
        hint = did_you_mean(named, table) or f"; there are {', '.join(sorted(table))}{more}, or module:name"
        raise ConfigError(f"{what}: there is no {named!r}{hint}")
    found = load_reference(named, what=what)
    if not callable(found) and not isinstance(found, BaseEnv | BaseInteraction):
        raise ConfigError(f"{what}: {named} is {found!r:.60}; name a class or a function")
    return found


def _is_interaction_factory(target: Any) -> bool:
    if isinstance(target, type):
        return issubclass(target, BaseInteraction)
    made = getattr(target, "__annotations__", {}).get("return")
    return "Interaction" in str(getattr(made, "__name__", made))


def _load_function(key: str, value: Any) -> Any:
    return load_reference(value, what=f"env: {key}") if key in _FUNCTION_OPTIONS and isinstance(value, str) else value


def _label(named: Any) -> str:
    return named if isinstance(named, str) else str(getattr(named, "__name__", named))
