"""Records a run's Python inputs in its folder, so that the command line can load them again.

Functions and classes become references; for those defined in notebook cells, to a copy of the source in RUN/code. Rows
become RUN/data/*.jsonl. Objects without a reference, such as those with state, are used directly and noted in the
config.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from os.path import realpath
from pathlib import Path
from types import FunctionType
from typing import Any

from toolwise.config.imports import GIVEN_IN_PYTHON, register, unregister
from toolwise.config.loader import build_config
from toolwise.config.moved_modules import current_module
from toolwise.config.schema import RewardPart, RunConfig
from toolwise.config.trainer import ObserverEntry
from toolwise.data.row_layout import RowLayout
from toolwise.data.task_rows import tasks_to_jsonl
from toolwise.data.task_set import TaskSet
from toolwise.errors import ConfigError, DataError, RewardError, ToolwiseError
from toolwise.notebook import collect_source, lacks_file, unwrap_target
from toolwise.rewards.function import Reward
from toolwise.sandbox.targets import library_folders, package_folder
from toolwise.serialization.files import write_atomic
from toolwise.tools.base import BaseTool
from toolwise.tools.catalog import TOOLS, as_entries
from toolwise.tools.function import FunctionTool
from toolwise.tools.isolation.code_location import has_main_guard
from toolwise.training.evaluate import weighted_sources
from toolwise.training.tasks import named_files
from toolwise.training.trackers.observers import observer_entries, qualified_name
from toolwise.types import Task

COMPONENTS = {
    "env": ("env", "name", ""),
    "agent": ("agent", "run", ""),
    "router": ("router", "name", "kwargs"),
    "parser": ("rollout", "tool_parser", ""),
    "estimator": ("algorithm", "adv_estimator", "estimator_kwargs"),
    "loss": ("actor", "policy_loss", "policy_loss_kwargs"),
}
"""The section of each part, and the settings for its name and its arguments."""
CORRECTABLE = ("code/estimator_", "code/loss_", "code/router_")
"""Definitions from notebook cells that may differ when a run is resumed: their errors end runs, to be fixed."""


@dataclass(slots=True)
class RunInputs:
    """A run's configuration, and the files it refers to, which must be written before anything loads them."""

    folder: Path
    config: RunConfig
    """The settings to build the run from, together with the Python objects."""
    recorded: RunConfig
    """The settings for config.toml: the same, with references to those objects."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Contents by path within the folder."""
    notes: list[str] = field(default_factory=list)
    """What could not be recorded, and why."""
    _registered: list[tuple[Any, str]] = field(default_factory=list)
    _created: list[Path] = field(default_factory=list)

    def add_tasks(self, which: str, argument: str | Path | Sequence[Any] | None, tasks: Sequence[Task] | None) -> None:
        """`which` is "train" or "val"; paths are recorded as they are, rows are copied."""
        if argument is None or tasks is None:
            return
        limit = "limit" if which == "train" else "val_limit"
        update: dict[str, Any] = {which: None, limit: None}  # the limit applies only to the file in the config
        if (files := named_files(argument)) is not None:
            update[which] = files
        elif isinstance(tasks, TaskSet):
            self.notes.append(f"data.{which} is not recorded: pass the paths of its files instead of opened tasks")
        else:
            try:
                text = tasks_to_jsonl(tasks, which, RowLayout.of(self.config.data))
                self.files[f"data/{which}.jsonl"] = text.encode("utf-8", "backslashreplace")
                update[which] = self.folder / "data" / f"{which}.jsonl"
            except DataError as fault:
                self.notes.append(f"data.{which} is not recorded: {fault}")
        self._record("data", self.recorded.data.model_copy(update=update))

    def add_tools(self, tools: Sequence[Any] | Callable[..., Any] | None) -> None:
        self._record("tools", [*self.recorded.tools, *map(self._tool_entry, as_entries(tools))])

    def add_reward(self, reward: Any) -> None:
        """A function, a reference or a `Reward`; a list of them, or of (reward, weight) pairs, is a sum of parts."""
        if reward is None:
            return
        several = isinstance(reward, list | tuple)
        parts = [
            RewardPart(
                function=self._reward_reference(part),
                kwargs={**(part.kwargs if isinstance(part, Reward) else {}), **self.recorded.reward.kwargs},
                weight=weight,
            )
            for part, weight in (weighted_sources(reward) if several else [(reward, 1.0)])
        ]
        update: dict[str, Any] = {"function": "", "kwargs": {}, "parts": parts}
        if not several:
            update = {"function": parts[0].function, "kwargs": parts[0].kwargs, "parts": []}
        self._record("reward", self.recorded.reward.model_copy(update=update))

    def add_observers(self, kind: str, observers: Any) -> None:
        """`kind` is "tracker" or "callback"; each is a reference, a table, a class, a function or an object."""
        entries = [self._observer_entry(kind, entry) for entry in observer_entries(observers)]
        before = getattr(self.recorded.trainer, f"{kind}s")
        self._record("trainer", self.recorded.trainer.model_copy(update={f"{kind}s": [*before, *entries]}))

    def add_component(self, kind: str, source: Any) -> None:
        """An environment, router, parser, estimator or loss: a name, a reference, a class or an object."""
        if source is None:
            return
        section, key, kwargs_key = COMPONENTS[kind]
        entry = self._observer_entry(kind, source)
        if isinstance(entry, ObserverEntry) and not kwargs_key:
            entry = self._note_unnameable(f"the {kind} {_name_of(source)}", f"a {kind} is created without arguments")
        name, kwargs = (entry, {}) if isinstance(entry, str) else (entry.name, entry.kwargs)
        # the configured arguments are also those of an estimator or a loss that Python names
        keeps_kwargs = not kwargs_key or (kind != "router" and isinstance(source, str | type))
        update = {key: name, **({} if keeps_kwargs else {kwargs_key: kwargs})}
        self._record(section, getattr(self.recorded, section).model_copy(update=update))
        if kind in ("env", "agent", "estimator", "loss"):
            self.config = self.config.model_copy(update={section: getattr(self.recorded, section)})

    def check_files(self) -> None:
        """Raise if a resumed run was given other rows or notebook cells than when it started."""
        for name, data in self.files.items():
            path = self.folder / name
            if path.exists() and path.read_bytes() != data and not name.startswith(CORRECTABLE):
                raise ConfigError(
                    f"cannot resume {self.folder}: the {'data' if name.startswith('data/') else 'definition'} differs "
                    f"from {path}; use a new out, or continue with what the folder has: toolwise.resume(folder)"
                )

    def write(self) -> None:
        """Write the files, and register the functions in them so that workers can find them."""
        paths = {self.folder / name: data for name, data in self.files.items()}
        needed = {folder for path in paths for folder in (path, path.parent, self.folder)}
        self._created = [path for path in needed if not path.exists()]
        try:
            for path, data in paths.items():
                write_atomic(path, data, private=path.parent.name == "code")
        except OSError as fault:
            raise ConfigError(f"cannot write to {self.folder} ({fault.strerror}): choose another --out") from fault
        for target, reference in self._registered:
            register(target, reference)

    def discard(self) -> None:
        """Undo `write`: the run did not start."""
        for target, _ in self._registered:
            unregister(target)
        for path in sorted(self._created, key=lambda path: -len(path.parts)):
            with suppress(OSError):  # keep a folder that now holds other files
                path.rmdir() if path.is_dir() else path.unlink()

    def _record(self, name: str, value: Any) -> None:
        self.recorded = self.recorded.model_copy(update={name: value})

    def _reward_reference(self, reward: Any) -> str:
        if isinstance(reward, Reward) and reward.reference is not None:
            return reward.reference
        target = reward.function if isinstance(reward, Reward) else reward
        if isinstance(target, str):
            return target
        name = _name_of(target)
        try:
            return self._reference(target, "reward")
        except ToolwiseError as fault:
            sandbox = self.config.reward.sandbox
            if sandbox.tier != "off" and getattr(target, "__module__", "") not in map(current_module, sandbox.trusted):
                raise RewardError(
                    f"reward {name}: the sandbox loads a reward from its file, but {fault}, "
                    'or set reward.sandbox.tier = "off" to run it in this process'
                ) from None
            return self._note_unnameable(f"the reward {name}", str(fault))

    def _tool_entry(self, entry: Any) -> str | dict[str, Any]:
        if isinstance(entry, str):
            return entry
        try:
            if isinstance(entry, Mapping):
                options = {key: value for key, value in entry.items() if key != "name"}
                inner = self._tool_entry(entry.get("name"))
                table = {**({"name": inner} if isinstance(inner, str) else inner), **options}
            elif isinstance(entry, FunctionTool):
                table = self._function_tool(entry)
            elif isinstance(entry, BaseTool):
                table = _builtin_entry(entry)
            else:
                table = {"name": self._reference(entry, "tool")}
            _check_serializable(table)
        except ToolwiseError as fault:
            name = entry.name if isinstance(entry, BaseTool) else getattr(entry, "__name__", repr(entry)[:60])
            return self._note_unnameable(f"the tool {name}", str(fault))
        return str(table["name"]) if len(table) == 1 else table

    def _observer_entry(self, kind: str, entry: Any) -> str | ObserverEntry:
        if isinstance(entry, str | ObserverEntry):
            return entry
        if isinstance(entry, Mapping):
            return build_config(ObserverEntry, dict(entry), source=f"trainer.{kind}s")
        by_fields = kind != "env" and is_dataclass(entry) and not isinstance(entry, type)
        try:
            kwargs = _field_values(entry) if by_fields else {}
            reference = self._reference(type(entry) if by_fields else entry, kind)
        except ToolwiseError as fault:
            if kind == "agent" or (kind == "env" and not callable(entry)):
                raise ConfigError(f"{kind}: {fault}") from None
            name = _name_of(entry) if kind == "env" else qualified_name(entry)
            return self._note_unnameable(f"the {kind} {name}", str(fault))
        return ObserverEntry(name=reference, kwargs=kwargs) if kwargs else reference

    def _function_tool(self, tool: FunctionTool[..., Any]) -> dict[str, Any]:
        """A decorated function by its name alone; a function wrapped by calling `tool(…)` with its options."""
        function = unwrap_target(tool)
        if _definition_of(function) is tool:
            return {"name": self._reference(tool, "tool")}
        if tool.name != getattr(function, "__name__", None):
            raise ToolwiseError(f"its name differs from the function's: use @tool(name={tool.name!r}) above the def")
        options = {"description": tool.tool_schema.function.description, "isolate": tool.isolate, **tool.config}
        given = {key: value for key, value in options.items() if value is not None}
        return {"name": self._reference(function, "tool"), **given}

    def _reference(self, target: Any, kind: str) -> str:
        """The reference by which another process loads `target`; copies the source if there is no file to load."""
        definition = unwrap_target(target)
        if not isinstance(definition, FunctionType | type):
            raise ToolwiseError(
                f"a {type(target).__name__} object cannot be loaded by name; pass a class or a function"
            )
        script = None if lacks_file(definition) else _unguarded_script(definition)
        if not lacks_file(definition) and script is None:
            return _named_reference(definition)
        try:
            source = collect_source(target)
        except ToolwiseError as fault:
            if script is None:
                raise
            raise ToolwiseError(
                f"importing {script.name} would run it again: put what it runs under "
                f'`if __name__ == "__main__":`; {fault}'
            ) from None
        name = f"code/{kind}_{definition.__name__}.py"
        if self.files.setdefault(name, source.encode()) != source.encode():
            raise ToolwiseError(f"two objects are named {definition.__name__}; rename one of them")
        reference = f"{self.folder / name}:{definition.__name__}"
        self._registered.append((definition, reference))
        return reference

    def _note_unnameable(self, what: str, reason: str) -> str:
        self.notes.append(
            f"{what} cannot be recorded in config.toml: {reason}; this run can use it, commands on its folder cannot"
        )
        return f"{GIVEN_IN_PYTHON}{what}"


def gather_inputs(
    config: RunConfig,
    folder: Path,
    *,
    tasks: tuple[Any, Sequence[Task] | None] = (None, None),
    val: tuple[Any, Sequence[Task] | None] = (None, None),
    tools: Sequence[Any] | Callable[..., Any] | None = None,
    reward: Any = None,
    env: Any = None,
    agent: Any = None,
    router: Any = None,
    parser: Any = None,
    estimator: Any = None,
    loss: Any = None,
    trackers: Any = None,
    callbacks: Any = None,
) -> RunInputs:
    """Collect the inputs without writing anything. `tasks` and `val` are pairs (argument, tasks loaded from it)."""
    inputs = RunInputs(Path(realpath(folder)), config, config)
    inputs.add_tasks("train", *tasks)
    inputs.add_tasks("val", *val)
    inputs.add_tools(tools)
    inputs.add_reward(reward)
    sources = {"env": env, "agent": agent, "router": router, "parser": parser, "estimator": estimator, "loss": loss}
    for kind, source in sources.items():
        inputs.add_component(kind, source)
    inputs.add_observers("tracker", trackers)
    inputs.add_observers("callback", callbacks)
    return inputs


def _name_of(target: Any) -> str:
    return str(getattr(target, "__name__", type(target).__name__))


def _named_reference(target: Any) -> str:
    """`package.module:name` if it can be imported from anywhere, else `file.py:name`."""
    name, module = target.__qualname__, sys.modules.get(target.__module__)
    if "<" in name:
        what = "a lambda" if "<lambda>" in name else f"{target.__name__} is defined inside a function, so it"
        raise ToolwiseError(f"{what} cannot be loaded by another process; define it at the top level of a file")
    if _definition_of(target) is None:
        raise ToolwiseError(f"{target.__module__} no longer has {name}; define it at the top level of a file")
    if isinstance(target, type) and getattr(module, "__file__", None) is None:  # a built-in class
        return f"{target.__module__}:{name}"
    file = Path(str(getattr(module, "__file__", None) or target.__code__.co_filename)).resolve()
    folders = [*map(realpath, library_folders()), str(package_folder())]
    installed = any(file.is_relative_to(folder) for folder in folders)
    in_package = "." in target.__module__ and (file.parent / "__init__.py").is_file()  # imports in it may be relative
    return f"{target.__module__}:{name}" if installed or in_package else f"{file}:{name}"


def _definition_of(target: Any) -> Any:
    """The object found under a function's or class's qualified name; None if it is a different one."""
    module = sys.modules.get(target.__module__)
    first, *rest = target.__qualname__.split(".")
    value = (getattr(target, "__globals__", None) or getattr(module, "__dict__", {})).get(first)
    for part in rest:
        value = getattr(value, part, None)
    return value if value is not None and unwrap_target(value) is target else None


def _unguarded_script(target: Any) -> Path | None:
    """The script that defines `target` if importing it would run it again (no main guard), else None."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    if target.__module__ != "__main__" or file is None or has_main_guard(Path(file)):
        return None
    return Path(file)


def _builtin_entry(tool: BaseTool) -> dict[str, Any]:
    name = next((name for name, kind in TOOLS.items() if type(tool) is kind), None)
    if name is None or tool.tool_schema != TOOLS[name](dict(tool.config)).tool_schema:
        raise ToolwiseError(f"it is a {type(tool).__name__} object that exists only in this process; pass its class")
    return {"name": name, **tool.config}


def _field_values(entry: Any) -> dict[str, Any]:
    """The arguments that create a dataclass object again, without those that have their default value."""
    given = ((item, getattr(entry, item.name)) for item in fields(entry) if item.init)
    kwargs = {item.name: value for item, value in given if value is not item.default}
    _check_serializable(kwargs)
    try:
        inspect.signature(type(entry)).bind(**kwargs)
    except TypeError as fault:
        raise ToolwiseError(f"its arguments are not its fields ({fault})") from None
    return kwargs


def _check_serializable(table: Mapping[str, Any]) -> None:
    """Raise unless TOML can represent the table."""
    try:
        text = json.dumps(table, allow_nan=False)
    except (TypeError, ValueError) as fault:
        raise ToolwiseError(f"its configuration is not plain data ({fault})") from None
    if json.loads(text) != table or _has_none(table):
        raise ToolwiseError("its configuration is not plain data")


def _has_none(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_has_none(item) for item in value.values())
    return value is None or (isinstance(value, list) and any(_has_none(item) for item in value))
