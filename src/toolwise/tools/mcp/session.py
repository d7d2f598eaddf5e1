"""A session with an MCP server: it starts the server, lists its tools, serves concurrent calls, and ends it.

Sessions run on an event loop in a separate thread (`LoopThread`), since the event loops of rollouts are short-lived.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import logging
import os
import shutil
import sys
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from toolwise.tools.call_errors import SERVER_DOWN, ToolCallError

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import Tool

log = logging.getLogger("toolwise.mcp")
T = TypeVar("T")

MAX_CONCURRENT_STARTS = 8
"""Maximum number of servers starting at once: a thousand rollouts must not start a thousand processes together."""
EXIT_S = 8.0
"""The SDK gives a server 2 s to exit by itself, 2 s after SIGTERM, and then kills it."""
PROBE_S = 10.0
"""How long a server that did not answer a call may take to list its tools."""
MAX_PAGES = 100
_TAIL_BYTES = 2000


@dataclass(frozen=True, slots=True)
class Address:
    """How to reach a server: a command that uses stdin and stdout, or a URL (streamable HTTP)."""

    command: tuple[str, ...] = ()
    url: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 30.0

    @property
    def name(self) -> str:
        """Name for messages, without arguments or a query, which may contain secrets."""
        return self.command[0] if self.command else self.url.partition("?")[0].rpartition("@")[2]


class LoopThread:
    """A long-lived event loop in a thread; it ends its sessions when Python exits."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.sessions: set[Session] = set()
        self.starting = asyncio.Semaphore(MAX_CONCURRENT_STARTS)
        self._pid = os.getpid()
        threading.Thread(target=self.loop.run_forever, name="toolwise-mcp", daemon=True).start()
        atexit.register(self.close)

    @property
    def in_creator_process(self) -> bool:
        """False in a forked child, which has the object but not the thread."""
        return os.getpid() == self._pid

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self) -> None:
        if self.in_creator_process:
            with suppress(TimeoutError):
                self.submit(self._end_all()).result(EXIT_S)

    async def _end_all(self) -> None:
        await asyncio.gather(*(session.end() for session in list(self.sessions)), return_exceptions=True)


_thread: LoopThread | None = None
_lock = threading.Lock()


def loop_thread() -> LoopThread:
    global _thread
    with _lock:
        if _thread is None or not _thread.in_creator_process:
            _thread = LoopThread()
        return _thread


class Session:
    """Created and used only on the loop of `LoopThread`."""

    def __init__(self, address: Address, thread: LoopThread) -> None:
        self.address = address
        self.client: Client | None = None
        self.tools: list[Tool] = []
        self.failed_at: float | None = None  # loop time at which the start failed
        self.ready: asyncio.Future[None] = thread.loop.create_future()
        self.ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())
        self._stop = asyncio.Event()
        self._end_requested = False
        self._stderr = b""
        self._invalid_output = ""
        self._probe: asyncio.Task[None] | None = None
        self._thread = thread
        thread.sessions.add(self)
        self._task = asyncio.create_task(self._run())

    @property
    def closed(self) -> bool:
        """No more calls: it was asked to end, or the server has exited."""
        return self._stop.is_set()

    def end(self) -> asyncio.Task[None]:
        """Start to end it; the task is done when everything is cleaned up."""
        self._end_requested = True
        self._stop.set()
        return self._task

    def check_alive(self) -> None:
        """After an unanswered call: end the session unless the server still lists its tools."""
        if self._probe is None and not self.closed:
            self._probe = asyncio.create_task(self._probe_server())

    async def _probe_server(self) -> None:
        try:
            async with asyncio.timeout(PROBE_S):
                await self._list()
        except Exception as fault:
            if not self.closed:
                log.warning("MCP server %s does not answer (%s): ending it", self.address.name, type(fault).__name__)
                self.end()
        finally:
            self._probe = None

    async def _run(self) -> None:
        try:
            async with AsyncExitStack() as stack:
                async with self._thread.starting, asyncio.timeout(self.address.start_timeout_s):
                    self.client = await stack.enter_async_context(self._make_client())
                    self.tools = await self._list()
                self.ready.set_result(None)
                await self._stop.wait()
                if not self._end_requested:
                    log.warning("MCP server %s has exited%s", self.address.name, self._last_stderr_line())
        except BaseException as fault:
            if not self.ready.done():
                self.failed_at = self._thread.loop.time()
                self.ready.set_exception(ToolCallError(self._failure_text(fault), SERVER_DOWN))
            elif not self._end_requested:
                log.warning("MCP server %s is gone: %s", self.address.name, self._failure_text(fault))
        finally:
            self._stop.set()
            self._thread.sessions.discard(self)

    async def _list(self) -> list[Tool]:
        if self.client is None:
            raise RuntimeError("not open yet")
        tools: list[Tool] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = await self.client.list_tools(cursor=cursor, cache_mode="bypass")
            tools += page.tools
            if not (cursor := page.next_cursor):
                break
        return tools

    def _make_client(self) -> Client:
        from mcp import Client

        # The SDK logs a traceback for each line it cannot parse; we report the problem in one line.
        if not log.isEnabledFor(logging.DEBUG):
            logging.getLogger("mcp").setLevel(logging.CRITICAL)
        transport = self._stdio() if self.address.command else self._http()
        return Client(transport, message_handler=self._on_message, cache=None)

    async def _on_message(self, message: Any) -> None:
        """Lines that are not messages arrive as exceptions."""
        if isinstance(message, Exception) and not self._invalid_output:
            errors: list[dict[str, Any]] = getattr(message, "errors", list)()
            self._invalid_output = str(errors[0].get("input", message) if errors else message)

    @asynccontextmanager
    async def _stdio(self) -> AsyncIterator[Any]:
        from mcp import StdioServerParameters, stdio_client

        program, *arguments = self.address.command
        parameters = StdioServerParameters(
            command=find_program(program, self.address.env),
            args=arguments,
            env=dict(self.address.env),
            cwd=self.address.cwd,
            encoding_error_handler="replace",
        )
        read_end, write_end = os.pipe()
        self._thread.loop.add_reader(read_end, self._keep_stderr, read_end)
        try:
            with os.fdopen(write_end, "w") as errors:
                async with stdio_client(parameters, errlog=errors) as (incoming, outgoing):
                    errors.close()  # the server has inherited it; while ours is open, its exit would go unnoticed
                    yield _EndNotifyingStream(incoming, self._stop), outgoing
        finally:
            self._thread.loop.remove_reader(read_end)
            os.close(read_end)

    @asynccontextmanager
    async def _http(self) -> AsyncIterator[Any]:
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        # No limits, no read timeout: every call has a deadline, and one that hangs must not block others.
        client = httpx2.AsyncClient(
            headers=dict(self.address.headers),
            timeout=httpx2.Timeout(self.address.start_timeout_s, read=None, pool=None),
            limits=httpx2.Limits(max_connections=None),
        )
        async with client, streamable_http_client(self.address.url, http_client=client) as (incoming, outgoing):
            yield _EndNotifyingStream(incoming, self._stop), outgoing

    def _keep_stderr(self, read_end: int) -> None:
        chunk = os.read(read_end, 65536)
        if not chunk:
            self._thread.loop.remove_reader(read_end)
        self._stderr = (self._stderr + chunk)[-_TAIL_BYTES:]

    def _failure_text(self, fault: BaseException) -> str:
        """One line: what went wrong, with the last line of the server's stderr."""
        while isinstance(fault, BaseExceptionGroup):
            fault = fault.exceptions[0]
        if isinstance(fault, FileNotFoundError):
            return f"there is no command {self.address.name!r}: install it, or give its full path"
        problem = f"{type(fault).__name__}: {fault}"
        if isinstance(fault, TimeoutError):
            problem = f"it did not answer within {self.address.start_timeout_s:g} s"
        elif self.address.command and self.closed:
            problem = "it exited before it answered"
        if self._invalid_output:
            problem += f"; it wrote something that is not JSON-RPC: {self._invalid_output[:80]!r}"
        return " ".join(f"{problem}{self._last_stderr_line()}".split())

    def _last_stderr_line(self) -> str:
        last = self._stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return f"; last line of its stderr: {last[:200]}" if last else ""


class _EndNotifyingStream:
    """A stream that signals its end, so that a server that died while idle is not called again."""

    def __init__(self, stream: Any, ended: asyncio.Event) -> None:
        self._stream, self._ended = stream, ended

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __aiter__(self) -> _EndNotifyingStream:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self._stream.__anext__()
        except StopAsyncIteration:
            self._ended.set()
            raise

    async def __aenter__(self) -> _EndNotifyingStream:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> Any:
        return await self._stream.__aexit__(*raised)


def find_program(program: str, env: Mapping[str, str]) -> str:
    """Look on the PATH, then next to this Python: a virtual environment need not be activated."""
    if os.sep in program:
        return program
    sibling = Path(sys.executable).parent / program
    return shutil.which(program, path=env.get("PATH")) or (str(sibling) if sibling.is_file() else program)
