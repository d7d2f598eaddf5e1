"""What a run is given in Python, recorded in its folder: so that the command line can load it again.

Functions and classes become references, those of notebook cells to a copy of their source in RUN/code; rows become
RUN/data/*.jsonl. What cannot be named, such as an object with state, is used as it is and recorded as such.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from os.path import realpath
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from toolwise.config.imports import GIVEN_IN_PYTHON, register, unregister
from toolwise.config.moved_modules import current_module
from toolwise.config.schema import RewardPart, RunConfig
from toolwise.data.task_rows import tasks_to_jsonl
from toolwise.errors import ConfigError, DataError, RewardError, ToolwiseError
from toolwise.notebook import collect_source, lacks_file, unwrap_target
from toolwise.rewards.function import Reward
from toolwise.sandbox.targets import library_folders, package_folder
from toolwise.tools.base import BaseTool
from toolwise.tools.catalog import TOOLS, as_entries
from toolwise.tools.function import FunctionTool
from toolwise.tools.isolation.code_location import has_main_guard
from toolwise.training.records import write_atomic
from toolwise.training.scoring import weighted_sources
from toolwise.types import Task


@dataclass(slots=True)
class RunInputs:
    """A run's configuration, and what it names: files that must be in the run's folder before anything loads them."""

    folder: Path
    config: RunConfig
    """What to build the run from, beside the objects given in Python."""
    recorded: RunConfig
    """What config.toml says: the same, with those objects by name."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Contents by path within the folder."""
    notes: list[str] = field(default_factory=list)
    """What could not be recorded, and why."""
    _registered: list[tuple[Any, str]] = field(default_factory=list)
    _created: list[Path] = field(default_factory=list)

    def add_tasks(self, which: str, given: str | Path | Sequence[Any] | None, tasks: Sequence[Task] | None) -> None:
        """`which` is "train" or "val"; a path is recorded as it is, rows are copied."""
        if given is None or tasks is None:
            return
        limit = "limit" if which == "train" else "val_limit"
        changed: dict[str, Any] = {which: None, limit: None}  # a limit is for the configuration's own file
        if isinstance(given, str | Path):
            changed[which] = Path(given)
        else:
            try:
                self.files[f"data/{which}.jsonl"] = tasks_to_jsonl(tasks, which).encode("utf-8", "backslashreplace")
                changed[which] = self.folder / "data" / f"{which}.jsonl"
            except DataError as fault:
                self.notes.append(f"data.{which} is not recorded: {fault}")
        self._record("data", self.recorded.data.model_copy(update=changed))

    def add_tools(self, given: Sequence[Any] | Callable[..., Any] | None) -> None:
        entries = [self._tool_entry(entry) for entry in as_entries(given)]
        self._record("tools", [*self.recorded.tools, *entries])

    def add_reward(self, given: Any) -> None:
        """A function, a reference or a `Reward`; a list of them, or of pairs with a weight, is a sum of parts."""
        if given is None:
            return
        several = isinstance(given, list | tuple)
        kwargs = self.recorded.reward.kwargs
        found = [
            RewardPart(
                function=self._reward_reference(part),
                kwargs={**(part.kwargs if isinstance(part, Reward) else {}), **kwargs},
                weight=weight,
            )
            for part, weight in (weighted_sources(given) if several else [(given, 1.0)])
        ]
        if several:
            changed: dict[str, Any] = {"function": "", "kwargs": {}, "parts": found}
        else:
            changed = {"function": found[0].function, "kwargs": found[0].kwargs, "parts": []}
        self._record("reward", self.recorded.reward.model_copy(update=changed))

    def add_env(self, given: Any) -> None:
        """A name or a reference, or a class or function, which is loaded by its reference here too."""
        if given is None:
            return
        try:
            name = given if isinstance(given, str) else self._reference(given, "env")
        except ToolwiseError as fault:
            raise ConfigError(f"env: {fault}") from None
        env = self.recorded.env.model_copy(update={"name": name})
        self._record("env", env)
        self.config = self.config.model_copy(update={"env": env})

    def check_files(self) -> None:
        """Whether a run that is resumed was given the same rows and the same cells as when it began."""
        for name, data in self.files.items():
            path = self.folder / name
            if path.exists() and path.read_bytes() != data:
                what = "other data" if name.startswith("data/") else "another definition"
                raise ConfigError(
                    f"cannot resume {self.folder}: it was given {what} than {path} holds; use a new out, or go on with "
                    "what the folder has: toolwise.resume(folder)"
                )

    def write(self) -> None:
        """Bring the files into the folder, and tell workers where to find the functions in them."""
        paths = {self.folder / name: data for name, data in self.files.items()}
        around = [folder for path in paths for folder in (path, path.parent, self.folder)]
        self._created = [path for path in dict.fromkeys(around) if not path.exists()]
        try:
            for path, data in paths.items():
                write_atomic(path, data, private=path.parent.name == "code")
        except OSError as fault:
            raise ConfigError(f"{self.folder} cannot be written ({fault.strerror}): choose another --out") from fault
        for target, reference in self._registered:
            register(target, reference)

    def discard(self) -> None:
        """Undo `write`: the run never began."""
        for target, _ in self._registered:
            unregister(target)
        for path in sorted(self._created, key=lambda path: -len(path.parts)):
            with suppress(OSError):  # a folder that holds something else by now stays
                path.rmdir() if path.is_dir() else path.unlink()

    def _record(self, name: str, value: Any) -> None:
        self.recorded = self.recorded.model_copy(update={name: value})

    def _reward_reference(self, given: Any) -> str:
        if isinstance(given, Reward) and given.reference is not None:
            return given.reference
        target = given.function if isinstance(given, Reward) else given
        if isinstance(target, str):
            return target
        name = getattr(target, "__name__", type(target).__name__)
        try:
            return self._reference(target, "reward")
        except ToolwiseError as fault:
            sandbox = self.config.reward.sandbox
            if sandbox.tier != "off" and getattr(target, "__module__", "") not in map(current_module, sandbox.trusted):
                raise RewardError(
                    f"reward {name}: a sandbox loads a reward from its file, and {fault}, "
                    'or set reward.sandbox.tier = "off" to run it in this process'
                ) from None
            return self._note_unnameable(f"the reward {name}", str(fault))

    def _tool_entry(self, entry: Any) -> str | dict[str, Any]:
        if isinstance(entry, str):
            return entry
        try:
            if isinstance(entry, Mapping):
                terms = {key: value for key, value in entry.items() if key != "name"}
                inner = self._tool_entry(entry.get("name"))
                found = {**({"name": inner} if isinstance(inner, str) else inner), **terms}
            elif isinstance(entry, FunctionTool):
                found = self._function_tool(entry)
            elif isinstance(entry, BaseTool):
                found = _builtin_entry(entry)
            else:
                found = {"name": self._reference(entry, "tool")}
            _check_serializable(found)
        except ToolwiseError as fault:
            name = entry.name if isinstance(entry, BaseTool) else getattr(entry, "__name__", repr(entry)[:60])
            return self._note_unnameable(f"the tool {name}", str(fault))
        return str(found["name"]) if len(found) == 1 else found

    def _function_tool(self, made: FunctionTool[..., Any]) -> dict[str, Any]:
        """A decorated function by its name; one that was made a tool by a call with its terms beside."""
        function = unwrap_target(made)
        if _definition_of(function) is made:
            return {"name": self._reference(made, "tool")}
        if made.name != getattr(function, "__name__", None):
            raise ToolwiseError(f"its name is not the function's: write it as @tool(name={made.name!r}) above the def")
        terms = {"description": made.tool_schema.function.description, "isolate": made.isolate, **made.config}
        found = {"name": self._reference(function, "tool")}
        return found | {key: value for key, value in terms.items() if value is not None}

    def _reference(self, target: Any, kind: str) -> str:
        """How another process finds `target`; copies its source where there is no file to load it from."""
        found = unwrap_target(target)
        if not isinstance(found, FunctionType | type):
            raise ToolwiseError(f"{type(target).__name__} objects have no name to load them by; write a function")
        script = None if lacks_file(found) else _unguarded_script(found)
        if not lacks_file(found) and script is None:
            return _named_reference(found)
        try:
            source = collect_source(target)
        except ToolwiseError as fault:
            if script is None:
                raise
            guard = 'put what it runs under `if __name__ == "__main__":`'
            raise ToolwiseError(f"loading {script.name} again would run it: {guard}; {fault}") from None
        name = f"code/{kind}_{found.__name__}.py"
        if self.files.setdefault(name, source.encode()) != source.encode():
            raise ToolwiseError(f"there are two of the name {found.__name__}; rename one of them")
        reference = f"{self.folder / name}:{found.__name__}"
        self._registered.append((found, reference))
        return reference

    def _note_unnameable(self, what: str, reason: str) -> str:
        self.notes.append(
            f"{what} cannot be named in config.toml: {reason}; this run uses it as it is, commands on its folder cannot"
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
) -> RunInputs:
    """Nothing is written yet. `tasks` and `val` are what was given, and the tasks in it."""
    inputs = RunInputs(Path(realpath(folder)), config, config)
    inputs.add_tasks("train", *tasks)
    inputs.add_tasks("val", *val)
    inputs.add_tools(tools)
    inputs.add_reward(reward)
    inputs.add_env(env)
    return inputs


def _named_reference(found: Any) -> str:
    """`package.module:name` where that can be imported from anywhere, else the file and the name in it."""
    name, module = found.__qualname__, sys.modules.get(found.__module__)
    if "<" in name:
        what = "a lambda" if "<lambda>" in name else f"{found.__name__} is defined inside a function, so it"
        raise ToolwiseError(f"{what} cannot be loaded by another process; write it as a def at the top of a file")
    if _definition_of(found) is None:
        raise ToolwiseError(f"{found.__module__} has no {name} any more; write it as a def at the top of a file")
    if isinstance(found, type) and getattr(module, "__file__", None) is None:  # a class of Python itself
        return f"{found.__module__}:{name}"
    file = Path(str(getattr(module, "__file__", None) or found.__code__.co_filename)).resolve()
    folders = [*(Path(folder).resolve() for folder in library_folders()), package_folder()]
    installed = any(file.is_relative_to(folder) for folder in folders)
    in_package = "." in found.__module__ and (file.parent / "__init__.py").is_file()  # where imports may be relative
    return f"{found.__module__}:{name}" if installed or in_package else f"{file}:{name}"


def _definition_of(found: Any) -> Any:
    """What stands where a function or class says that it is defined; None where that is something else."""
    module: ModuleType | None = sys.modules.get(found.__module__)
    space = getattr(found, "__globals__", None) or (vars(module) if module is not None else {})
    first, *rest = found.__qualname__.split(".")
    at = space.get(first)
    for part in rest:
        at = getattr(at, part, None)
    return at if at is not None and unwrap_target(at) is found else None


def _unguarded_script(found: Any) -> Path | None:
    """The file of a script that would start its work again if it were loaded; None where it is not such a one."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    if found.__module__ != "__main__" or file is None or has_main_guard(Path(file)):
        return None
    return Path(file)


def _builtin_entry(tool: BaseTool) -> dict[str, Any]:
    name = next((name for name, kind in TOOLS.items() if type(tool) is kind), None)
    if name is None or tool.tool_schema != TOOLS[name](dict(tool.config)).tool_schema:
        raise ToolwiseError(f"it is a {type(tool).__name__} object, which only this process has; give its class")
    return {"name": name, **tool.config}


def _check_serializable(table: Mapping[str, Any]) -> None:
    """Whether TOML can hold it."""
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
