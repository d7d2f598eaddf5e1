"""Tools of an MCP server: each becomes a `BaseTool`, so one entry in a run's `tools` can give several."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from toolwise.config.imports import did_you_mean
from toolwise.errors import ConfigError, MissingExtraError, ToolwiseError
from toolwise.tools.base import BaseTool, FunctionSchema, OpenAIFunctionToolSchema, ToolResult
from toolwise.tools.call_errors import ToolCallError
from toolwise.tools.function import check_option_names, checked, checked_seconds
from toolwise.tools.mcp.server import McpServer, RolloutServers
from toolwise.tools.mcp.session import Address
from toolwise.untrusted.json_schema import compile_parameters

if TYPE_CHECKING:
    from mcp.types import CallToolResult, Tool

DEFAULT_TIMEOUT_S = 30.0
CONFIG_KEYS = frozenset(
    {
        *("command", "args", "env", "cwd", "url", "headers"),
        *("include", "prefix", "scope", "timeout_s", "start_timeout_s", "family", "price", "max_concurrent"),
    }
)
_Texts = Sequence[Annotated[str, Field(pattern=r"^[^\x00]*$")]]

_INVALID_NAME_CHARS = re.compile(r"[^A-Za-z0-9_-]")
_VARIABLE = re.compile(r"\$\{(\w+)\}")


class McpTool(BaseTool):
    """One tool of a server. `remote_name` is its name on the server."""

    def __init__(
        self,
        config: dict[str, Any],
        tool_schema: OpenAIFunctionToolSchema,
        *,
        servers: RolloutServers,
        remote_name: str,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        super().__init__(config, tool_schema)
        self.servers = servers
        self.remote_name = remote_name
        self.timeout_s = timeout_s

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        instance_id = await super().create(instance_id, **kwargs)
        await self.servers.attach(instance_id)
        return instance_id

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
        server = self.servers.server_for(instance_id)
        result = await server.call(self.remote_name, _sendable(parameters), self.timeout_s)
        text = result_text(result)
        if result.is_error:
            raise ToolCallError(text or "the tool failed and did not say why")
        return text, None, {"ok": True}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        await self.servers.detach(instance_id)


def mcp_tools(config: Mapping[str, Any]) -> list[BaseTool]:
    """Connect to the server that `config` describes and return its tools; an unreachable server is an error.

    Configuration: `command` (a string or a list) with `args`, `env`, `cwd`, or `url` with `headers`; `include` (names
    of tools, all by default), `prefix` (prepended to each name), `scope` ("run": one server for all rollouts;
    "rollout": one per rollout), `timeout_s` (per call), `start_timeout_s`, `family`, `price`, `max_concurrent`.
    `${NAME}` in `env` and `headers` is replaced by an environment variable.
    """
    import importlib.util

    if importlib.util.find_spec("mcp") is None:
        raise MissingExtraError("mcp", "mcp")
    address = read_address(config)
    scope = checked(config.get("scope", "run"), Literal["run", "rollout"], "tools: mcp: scope", "one of run, rollout")
    timeout_s = checked_seconds(config.get("timeout_s", DEFAULT_TIMEOUT_S), "tools: mcp: timeout_s")
    prefix = _string(config, "prefix")
    server = McpServer(address)
    try:
        offered = server.tools()
    except ToolCallError as fault:
        raise ConfigError(f"tools: {fault}") from None
    selected = _select_tools(offered, config.get("include"), address)
    if scope == "rollout":
        server.close_and_wait()
    servers = RolloutServers(address, server if scope == "run" else None)
    options = {key: config[key] for key in ("family", "price", "max_concurrent") if key in config}
    return [
        McpTool(options, _schema(tool, prefix, address), servers=servers, remote_name=tool.name, timeout_s=timeout_s)
        for tool in selected
    ]


def read_address(config: Mapping[str, Any]) -> Address:
    """Validate the configuration and return the server's address."""
    check_option_names(config, CONFIG_KEYS, "mcp")
    command, url = config.get("command"), _string(config, "url")
    if bool(command) == bool(url):
        raise ConfigError("tools: mcp needs either a command or a url, not both")
    if url and not url.startswith(("http://", "https://")):
        raise ConfigError(f"tools: mcp: url must begin with http:// or https://, got {url!r}")
    program = [command] if isinstance(command, str) else command or []
    cwd = _string(config, "cwd") or None
    if cwd is not None and not Path(cwd).is_dir():
        raise ConfigError(f"tools: mcp: cwd {cwd} is not a folder; use an existing one")
    for key in ("env", "cwd", "args") if url else ("headers",):
        if config.get(key):
            raise ConfigError(f"tools: mcp: {key} needs a {'command' if url else 'url'}; remove it")
    return Address(
        command=(*_strings(program, "command"), *_strings(config.get("args") or [], "args")),
        url=url,
        env=_expand_variables(config, "env"),
        cwd=cwd,
        headers=_expand_variables(config, "headers"),
        start_timeout_s=checked_seconds(config.get("start_timeout_s", 30.0), "tools: mcp: start_timeout_s"),
    )


def result_text(result: CallToolResult) -> str:
    """Text for the model: text parts unchanged, other parts by name; structured content if there is no text."""
    parts = [_part_text(part) for part in result.content]
    if not any(part.type == "text" for part in result.content) and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(parts)


def _sendable(arguments: dict[str, Any]) -> dict[str, Any]:
    """Make the arguments safe to send: the SDK drops the whole session over a lone surrogate or a NaN."""
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        raise ToolCallError("the arguments hold a number that is none, or are nested too deeply") from None
    return dict(json.loads(text.encode("utf-8", "replace")))


def _part_text(part: Any) -> str:
    if part.type == "text":
        return str(part.text)
    if part.type == "resource":
        return str(getattr(part.resource, "text", f"[resource {part.resource.uri}]"))
    return f"[link {part.uri}]" if part.type == "resource_link" else f"[{part.type}]"


def _select_tools(offered: list[Tool], include: Any, address: Address) -> list[Tool]:
    if include is None:
        if not offered:
            raise ConfigError(f"tools: MCP server {address.name} offers no tools; use another one")
        return offered
    by_name = {tool.name: tool for tool in offered}
    for name in _strings(include, "include"):
        if name not in by_name:
            hint = did_you_mean(name, by_name) or f"; it has {', '.join(by_name) or 'none'}"
            raise ConfigError(f"tools: MCP server {address.name} has no tool {name!r}{hint}")
    return [by_name[name] for name in dict.fromkeys(include)]


def _schema(tool: Tool, prefix: str, address: Address) -> OpenAIFunctionToolSchema:
    # Chat APIs allow fewer characters in names than MCP.
    name = _INVALID_NAME_CHARS.sub("_", f"{prefix}{tool.name}")[:64]
    parameters = {key: value for key, value in tool.input_schema.items() if key not in ("$schema", "title")}
    try:
        compile_parameters(name, json.dumps(parameters, sort_keys=True))
    except ToolwiseError as error:
        raise ConfigError(f"tools: MCP server {address.name}: {error}; leave it out with include") from None
    return OpenAIFunctionToolSchema(
        function=FunctionSchema(name=name, description=tool.description or tool.title or "", parameters=parameters)
    )


def _string(config: Mapping[str, Any], key: str) -> str:
    return str(checked(config.get(key) or "", str, f"tools: mcp: {key}", "a string"))


def _strings(value: Any, key: str) -> list[str]:
    return list(checked(value, _Texts, f"tools: mcp: {key}", "a list of strings"))


def _expand_variables(config: Mapping[str, Any], key: str) -> dict[str, str]:
    """Replace `${NAME}`. Secrets belong in the environment: a run's configuration is stored in its folder."""
    table = checked(config.get(key) or {}, dict[str, str], f"tools: mcp: {key}", "a table of strings")

    def value_of(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise ConfigError(f"tools: mcp: {key} uses ${{{match[1]}}}, which is not set; export it")
        return os.environ[match[1]]

    return {name: _VARIABLE.sub(value_of, text) for name, text in table.items()}
