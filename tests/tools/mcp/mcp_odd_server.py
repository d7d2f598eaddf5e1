"""A misbehaving MCP server for test_mcp.py: `python mcp_odd_server.py stdio`, or `http PORT`."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import CallToolResult, TextContent

server = MCPServer("odd")
kept: list[str] = []
cancelled: list[str] = []


@server.tool(description="Gives the text back.")
async def echo(text: str, wait_s: float = 0.0) -> str:
    await asyncio.sleep(wait_s)
    return text


@server.tool()
async def hang(mark: str = "") -> str:
    try:
        await asyncio.sleep(3600)
    except BaseException:
        cancelled.append(mark)
        raise
    return "never"


@server.tool()
async def was_cancelled(mark: str) -> bool:
    return mark in cancelled


@server.tool()
async def block() -> str:
    time.sleep(3600)  # noqa: ASYNC251  # the whole server hangs: that is the point
    return "never"


@server.tool()
async def fail(reason: str) -> str:
    raise ToolError(reason)


@server.tool()
async def die() -> str:
    os._exit(3)


@server.tool()
async def keep(word: str) -> str:
    kept.append(word)
    return ",".join(kept)


@server.tool()
async def recall() -> str:
    return ",".join(kept)


@server.tool(structured_output=False)
async def picture() -> list[Any]:
    return ["look:", Image(data=b"\x89PNG", format="png")]


@server.tool()
async def numbers() -> CallToolResult:
    return CallToolResult(content=[], structured_content={"a": 1, "b": "é"})


@server.tool()
async def pid() -> int:
    return os.getpid()


@server.tool(name="odd/na.me")
async def odd_name() -> CallToolResult:
    return CallToolResult(content=[TextContent(text="found"), TextContent(text="me")])


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        server.run("streamable-http", port=int(sys.argv[2]))
