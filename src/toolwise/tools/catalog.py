"""The tools of a run: the built-in ones by name, tools built from `tools` entries, checks of the arguments that tasks
pass to them, and the record of the tools that a model was trained with, next to its weights."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from toolwise.config.imports import did_you_mean, load_reference
from toolwise.errors import CheckpointError, ConfigError, DataError, ToolwiseError
from toolwise.serialization.json_text import json_text
from toolwise.tools.base import BaseTool, OpenAIFunctionToolSchema
from toolwise.tools.builtin.calculator import CalculatorTool
from toolwise.tools.builtin.gsm8k import Gsm8kTool
from toolwise.tools.builtin.program import PythonTool, ShellTool
from toolwise.tools.builtin.search.tool import SearchTool
from toolwise.tools.function import FunctionTool, as_tool, check_option_names, check_tool_options
from toolwise.tools.isolation.isolated_tool import isolate_tool
from toolwise.tools.mcp.tools import mcp_tools
from toolwise.types import Task
from toolwise.untrusted.json_schema import compile_parameters

log = logging.getLogger("toolwise.tools")
ToolSpec = str | BaseTool | Callable[..., Any] | Mapping[str, Any]

TOOLS: dict[str, Callable[[dict[str, Any]], BaseTool]] = {
    "calculator": CalculatorTool,
    "search": SearchTool,
    "calc_gsm8k_reward": Gsm8kTool,
    "python": PythonTool,
    "shell": ShellTool,
}
GROUPS: dict[str, Callable[[dict[str, Any]], list[BaseTool]]] = {"mcp": mcp_tools}
"""Names that expand to several tools."""
TOOLS_FILE = "tools.json"
"""In a checkpoint's model folder and in an export; plain `transformers` ignores it."""
TOOLS_FORMAT = 1
_KWARGS_KEYS = ("create_kwargs", "execute_kwargs")
_COMMON_OPTIONS = frozenset({"family", "price", "isolate", "max_concurrent"})


def as_entries(tools: ToolSpec | Sequence[ToolSpec] | None) -> list[ToolSpec]:
    """Normalize to a list: `tools=f` means `tools=[f]`."""
    if tools is None:
        return []
    if isinstance(tools, str | BaseTool | Mapping) or callable(tools):
        return [tools]
    if not isinstance(tools, Iterable):
        raise ConfigError(f"tools: {tools!r:.80} is neither a tool nor a list of tools")
    return list(tools)


def build_tools(entries: Sequence[ToolSpec]) -> dict[str, BaseTool]:
    """name -> tool, in the order of `entries`.

    An entry is the name of a built-in tool, a reference (`package.module:attr` or `path/to/file.py:attr`), a tool, a
    typed function, or a mapping with one of these as its `name` and the tool's options as further keys.
    """
    tools: dict[str, BaseTool] = {}
    for tool in (isolate_tool(tool) for entry in entries for tool in _build(entry)):
        if tool.name in tools:
            raise ConfigError(f"tools: {tool.name!r} is listed twice; remove one, or rename it in its schema")
        parameters = json.dumps(tool.tool_schema.function.parameters, sort_keys=True)
        if '"pattern' in parameters:  # reject a bad pattern now, not at the first call
            compile_parameters(tool.name, parameters)
        tools[tool.name] = tool
    return tools


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


def _build(entry: ToolSpec) -> list[BaseTool]:
    if not isinstance(entry, Mapping):
        entry = {"name": entry}
    if "name" not in entry:
        raise ConfigError(f"tools: an entry has no `name`, only {', '.join(map(str, entry)) or 'nothing'}")
    config = {key: value for key, value in entry.items() if key != "name"}
    name = entry["name"]
    where = label_of(name)
    check_tool_options(config, f"tools: {where}")
    if isinstance(name, str) and name in GROUPS:
        return GROUPS[name](config)
    target = _load(name) if isinstance(name, str) else name
    if inspect.isclass(target) and issubclass(target, BaseTool):
        return [_construct(target, config, where)]
    return [target(config) if isinstance(name, str) and name in TOOLS else _adapt(target, config, where)]


def label_of(entry: Any) -> str:
    """Name of a reference, a class or a function, for messages."""
    return entry if isinstance(entry, str) else str(getattr(entry, "__name__", entry))


def _load(name: str) -> Any:
    """The tool, tool class or function with this name or reference."""
    if name not in TOOLS and ":" not in name:
        known = sorted((*TOOLS, *GROUPS))
        hint = did_you_mean(name, known) or f"; there are {', '.join(known)}, or module:attr"
        raise ConfigError(f"tools: there is no tool {name!r}{hint}")
    return TOOLS.get(name) or load_reference(name, what="tools")


def _adapt(target: Any, config: dict[str, Any], where: str) -> BaseTool:
    """Make a tool from a function, or take an existing tool; only a function's options can still be changed."""
    try:
        tool = as_tool(target)
    except ToolwiseError as error:
        raise ConfigError(f"tools: {where}: {error}") from error
    if not config:
        return tool
    if not isinstance(tool, FunctionTool):
        raise ConfigError(f"tools: {where} is an existing tool object; set {', '.join(config)} where it is created")
    check_option_names(config, _COMMON_OPTIONS | {"description"}, where)
    return tool.with_options(**config)


def _construct(kind: type[BaseTool], config: dict[str, Any], where: str) -> BaseTool:
    """Create an instance of a tool class, with the `tool_schema` of the configuration if there is one."""
    if (known := getattr(kind, "config_keys", None)) is not None:
        check_option_names(config, known | _COMMON_OPTIONS | {"tool_schema"}, where)
    schema_config = config.pop("tool_schema", None)
    if schema_config is None:
        parameter = inspect.signature(kind).parameters.get("tool_schema")
        if parameter is not None and parameter.default is parameter.empty:
            raise ConfigError(f"tools: {where} needs a tool_schema next to its name")
        return kind(config)  # type: ignore[call-arg]  # the class has a default schema
    try:
        schema = OpenAIFunctionToolSchema.model_validate(schema_config)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(map(str, ("tool_schema", *first["loc"])))
        raise ConfigError(f"tools: {where}: {path}: {first['msg']}") from None
    return kind(config, schema)


def write_tools(folder: Path, tools: Mapping[str, BaseTool]) -> None:
    """Write the names and schemas of `tools` in OpenAI's format."""
    record = {"format": TOOLS_FORMAT, "tools": [_schema(tool) for tool in tools.values()]}
    (folder / TOOLS_FILE).write_text(json_text(record, indent=2) + "\n", encoding="utf-8")


def read_tools(folder: Path) -> dict[str, Any]:
    """name -> schema; empty if an older version wrote the folder."""
    try:
        record = json.loads((folder / TOOLS_FILE).read_text(encoding="utf-8"))
        if record["format"] != TOOLS_FORMAT:
            raise CheckpointError(
                f"{folder / TOOLS_FILE} has format {record['format']}, this version reads {TOOLS_FORMAT}"
            )
        return {schema["function"]["name"]: schema for schema in record["tools"]}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise CheckpointError(
            f"{folder / TOOLS_FILE} cannot be read ({fault}): copy or export the folder again"
        ) from None


def check_recorded_tools(folder: Path, tools: Mapping[str, BaseTool], hint: str) -> None:
    """Raise if a tool that the model in `folder` was trained with is missing; `hint` tells the user what to do."""
    recorded = read_tools(folder)
    if missing := [name for name in recorded if name not in tools]:
        names = ", ".join(recorded)
        raise ConfigError(f"{folder} was trained with the tools {names}; missing here: {', '.join(missing)}; {hint}")
    for name, schema in recorded.items():
        if _schema(tools[name])["function"]["parameters"] != schema["function"]["parameters"]:
            log.warning("the tool %s takes other arguments than when %s was trained", name, folder)


def _schema(tool: BaseTool) -> dict[str, Any]:
    return tool.get_openai_tool_schema().model_dump(mode="json")
