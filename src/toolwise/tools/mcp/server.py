"""MCP servers as rollouts use them: callable from any event loop, restarted after a crash, with a deadline per call.

A `Session` (`session.py`) covers one start of a server; this module decides which rollout uses which server.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from typing import TYPE_CHECKING, Any

from toolwise.concurrency.deadlines import exclude_queue_time
from toolwise.tools.call_errors import SERVER_DOWN, ToolCallError
from toolwise.tools.mcp.session import EXIT_S, Address, LoopThread, Session, loop_thread

if TYPE_CHECKING:
    from mcp.types import CallToolResult, Tool

log = logging.getLogger("toolwise.mcp")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Pauses between attempts to start a server that fails to start; each is twice the previous one."""

# Errors of the SDK's HTTP transport for an answer without JSON-RPC: an unknown session, a 5xx.
_LOST_SESSION_ERRORS = ("Session terminated", "Server returned an error response")


class McpServer:
    """One server. Its state changes only on the loop of `LoopThread`, so no locks are needed."""

    def __init__(self, address: Address, *, restart: bool = True) -> None:
        self.address = address
        self.starts = 0
        self._restart = restart
        self._thread = loop_thread()
        self._session: Session | None = None
        self._failed_starts = 0
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        # When the tools are garbage collected, end the server. Not a method: that would keep `self` alive.
        weakref.finalize(self, _end_sessions, self._thread, self._sessions).atexit = False

    @property
    def restarts(self) -> int:
        return max(0, self.starts - 1)

    def tools(self) -> list[Tool]:
        """The server's tools. Blocks, so call it before a run starts."""
        return self._thread.submit(self._open()).result().tools

    async def start(self) -> None:
        """Does not count towards the tool's deadline: few servers start at once, each within its `start_timeout_s`."""
        with exclude_queue_time():
            await asyncio.wrap_future(self._thread.submit(self._open()))

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> CallToolResult:
        """The server's answer, or a `ToolCallError`. Cancellation and the deadline tell the server to stop."""
        answer = asyncio.wrap_future(self._thread.submit(self._call(name, arguments)))
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise ToolCallError(f"took longer than {timeout_s:g} s", "timeout") from None

    async def close(self) -> None:
        """End the server. It also ends if the caller does not wait."""
        await asyncio.wait({asyncio.wrap_future(self._thread.submit(self._end()))}, timeout=EXIT_S)

    def close_and_wait(self) -> None:
        self._thread.submit(self._end()).result(EXIT_S)

    async def _end(self) -> None:
        self._restart = False
        if self._session is not None:
            await asyncio.wait({self._session.end()})

    async def _open(self) -> Session:
        """The current session, or a new one; concurrent callers wait for the same one."""
        if self._session is None or self._session.closed:
            self._check_may_start()
            self._session = Session(self.address, self._thread)
            self._sessions.add(self._session)
            self.starts += 1
            if self.restarts:
                log.warning("restarting MCP server %s (%d)", self.address.name, self.restarts)
        session = self._session
        try:
            await asyncio.shield(session.ready)  # a cancelled caller must not cancel it for the others
        except ToolCallError as fault:
            raise ToolCallError(f"MCP server {self.address.name}: {fault}", fault.failure) from None
        return session

    def _check_may_start(self) -> None:
        if self._session is not None and not self._restart:
            raise self._down_error("it has exited, and its state for this rollout is lost")
        failed_at = self._session.failed_at if self._session is not None else None
        if failed_at is None:
            self._failed_starts = 0
            return
        pause_s = min(FIRST_PAUSE_S * 2**self._failed_starts, LONGEST_PAUSE_S)
        if (remaining_s := failed_at + pause_s - self._thread.loop.time()) > 0:
            raise self._down_error(f"it failed to start; the next attempt is in {remaining_s:.1f} s")
        self._failed_starts = min(self._failed_starts + 1, 16)

    async def _call(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        session = await self._open()
        assert session.client is not None
        try:
            return await session.client.call_tool(name, arguments)
        except asyncio.CancelledError:
            session.check_alive()
            raise
        except Exception as fault:  # an error of the SDK concerns this answer only, unless the session has ended
            code = fault.code if isinstance(fault, MCPError) else None
            if session.closed or code == CONNECTION_CLOSED or str(fault) in _LOST_SESSION_ERRORS:
                session.end() if str(fault) == _LOST_SESSION_ERRORS[0] else session.check_alive()
                raise self._down_error(f"it went away during the call ({fault})") from None
            raise ToolCallError(str(fault) or type(fault).__name__) from None

    def _down_error(self, why: str) -> ToolCallError:
        return ToolCallError(f"MCP server {self.address.name}: {why}", SERVER_DOWN)


class RolloutServers:
    """The servers of all rollouts: `shared` by all of them, or one each, for stateful servers. Tools created under the
    same id share a server."""

    def __init__(self, address: Address, shared: McpServer | None) -> None:
        self._address, self._shared = address, shared
        self._servers: dict[str, tuple[McpServer, int]] = {}

    async def attach(self, instance_id: str) -> None:
        if self._shared is not None:
            return
        server, users = self._servers.get(instance_id) or (McpServer(self._address, restart=False), 0)
        self._servers[instance_id] = (server, users + 1)
        try:
            await server.start()
        except BaseException:  # release is not called if create fails
            await self.detach(instance_id)
            raise

    async def detach(self, instance_id: str) -> None:
        server, users = self._servers.pop(instance_id, (None, 0))
        if server is not None and users > 1:
            self._servers[instance_id] = (server, users - 1)
        elif server is not None:
            await server.close()

    def server_for(self, instance_id: str) -> McpServer:
        return self._shared or self._servers[instance_id][0]


def _end_sessions(thread: LoopThread, sessions: weakref.WeakSet[Session]) -> None:
    """May run in any thread, as the garbage collector does."""
    if thread.in_creator_process and not thread.loop.is_closed():
        for session in list(sessions):
            thread.loop.call_soon_threadsafe(session.end)
