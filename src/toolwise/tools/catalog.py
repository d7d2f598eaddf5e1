"""The built-in tools by name, and the function that builds tools from a run's `tools` entries."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from toolwise.config.imports import did_you_mean, load_reference
from toolwise.errors import ConfigError, ToolwiseError
from toolwise.tools.base import BaseTool, OpenAIFunctionToolSchema
from toolwise.tools.builtin.calculator import CalculatorTool
from toolwise.tools.builtin.gsm8k import Gsm8kTool
from toolwise.tools.builtin.program import PythonTool, ShellTool
from toolwise.tools.builtin.search.tool import SearchTool
from toolwise.tools.function import FunctionTool, as_tool, check_option_names, check_tool_options
from toolwise.tools.isolation.isolated_tool import isolate_tool
from toolwise.tools.mcp.tools import mcp_tools
from toolwise.untrusted.json_schema import compile_parameters

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


def _build(entry: ToolSpec) -> list[BaseTool]:
    if not isinstance(entry, Mapping):
        entry = {"name": entry}
    if "name" not in entry:
        raise ConfigError(f"tools: an entry has no `name`, only {', '.join(map(str, entry)) or 'nothing'}")
    config = {key: value for key, value in entry.items() if key != "name"}
    where = _label(entry["name"])
    try:
        check_tool_options(config, f"tools: {where}")
    except ToolwiseError as error:
        raise ConfigError(str(error)) from None
    if isinstance(entry["name"], str) and where in GROUPS:
        return GROUPS[where](config)
    target = _resolve(entry["name"])
    if inspect.isclass(target) and issubclass(target, BaseTool):
        return [_construct(target, config, where)]
    if isinstance(entry["name"], str) and where in TOOLS:
        return [TOOLS[where](config)]
    return [_adapt(target, config, where)]


def _label(entry: Any) -> str:
    return entry if isinstance(entry, str) else str(getattr(entry, "__name__", entry))


def _resolve(entry: Any) -> Any:
    """The object an entry refers to: a tool, a tool class, or a function."""
    if not isinstance(entry, str):
        return entry
    if entry in TOOLS:
        return TOOLS[entry]
    if ":" not in entry:
        known = sorted((*TOOLS, *GROUPS))
        hint = did_you_mean(entry, known) or f"; there are {', '.join(known)}, or module:attr"
        raise ConfigError(f"tools: there is no tool {entry!r}{hint}")
    return load_reference(entry, what="tools")


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
    known = getattr(kind, "config_keys", None)
    if known is not None:
        check_option_names(config, known | _COMMON_OPTIONS | {"tool_schema"}, where)
    schema_config = config.pop("tool_schema", None)
    parameters = inspect.signature(kind).parameters
    required = "tool_schema" in parameters and parameters["tool_schema"].default is inspect.Parameter.empty
    if schema_config is None and required:
        raise ConfigError(f"tools: {where} needs a tool_schema next to its name")
    if schema_config is None:
        return kind(config)  # type: ignore[call-arg]  # the class has a default schema
    try:
        schema = OpenAIFunctionToolSchema.model_validate(schema_config)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(map(str, ("tool_schema", *first["loc"])))
        raise ConfigError(f"tools: {where}: {path}: {first['msg']}") from None
    return kind(config, schema)
