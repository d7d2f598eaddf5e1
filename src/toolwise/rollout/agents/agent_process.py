"""One process of an outside agent, in any environment: starts it below a supervisor, talks to it, and ends it."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from toolwise.concurrency.tasks import spawn
from toolwise.errors import ToolwiseError
from toolwise.rollout.agents import agent_worker
from toolwise.sandbox import wire
from toolwise.sandbox.faults import WorkerFault
from toolwise.sandbox.process_tree import SUPERVISION_AVAILABLE, members_of
from toolwise.sandbox.processes import describe_exit
from toolwise.tools.isolation.tool_process import start_supervised

log = logging.getLogger("toolwise.agents")
MAX_REPLY_BYTES = 8 << 20
MAX_LOGGED_LINES = 100
"""Lines logged per task; the rest is read, so that the agent never blocks on output, and dropped."""
MAX_LINE_CHARS = 2000
EXIT_WAIT_S = 1.0
_ids = itertools.count(1)


class AgentDiedError(ToolwiseError):
    """The agent's process died or never started: not something that the policy caused."""


class AgentLoadError(AgentDiedError):
    """The agent's function does not load; another process would fail too."""


class AgentFaultError(ToolwiseError):
    """The agent raised, or its command failed; the message is what it said."""


class AgentProcess:
    """A running command with a socket to it. `worker`: it is `agent_worker.py`, which answers one task after another;
    otherwise the socket is its standard input and output."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, worker: bool) -> None:
        """Blocks for the time that starting a process takes; raises `OSError`."""
        self.name = Path(command[-1] if worker else command[0]).name
        self.threads = 0
        """Threads in it after its last task."""
        self._exit_text: str | None = None
        self._killed = False
        self._reader = wire.FrameReader(MAX_REPLY_BYTES)
        self._lines = 0
        options = {"command": list(command), "worker": worker}
        self._process = start_supervised("toolwise.rollout.agents.agent_start", options, environment)
        self._lock = threading.Lock()
        self.thread = threading.Thread(target=self._watch, name="toolwise-agent", daemon=True)
        self.thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._exit_text is None and not self._killed

    async def load(self, target: str, path: Sequence[str]) -> None:
        """Let the worker load `target`; it then waits for tasks."""
        await self._send(wire.to_frame(wire.encode({"target": target, "path": list(path)})))
        reply = await self._receive_frame()
        if "loaded" not in reply:
            raise AgentLoadError(f"agent.run = {target!r} does not load: {reply.get('failed', 'it gave no reason')}")

    async def run(self, task: Mapping[str, Any], base_url: str, api_key: str) -> Any:
        """The result of one task. Raises `AgentFaultError` if the agent raised, `AgentDiedError` if it died."""
        self._lines, call_id = 0, next(_ids)
        request = {"id": call_id, "task": task, "base_url": base_url, "api_key": api_key}
        await self._send(wire.to_frame(wire.encode(request)))
        reply = await self._receive_frame()
        if reply.get("id") != call_id:
            raise AgentDiedError("the agent's process sent an unexpected reply")
        self.threads = int(reply.get("threads") or 0)
        if "fault" in reply:
            raise AgentFaultError(str(reply["fault"]))
        return reply.get("result")

    async def run_once(self, task: Mapping[str, Any]) -> Any:
        """Give a command its task as JSON on standard input; the last line that it prints is its result."""
        sending = spawn(self._send(wire.encode(task), last=True))  # it may print before it reads, or never read
        output = bytearray()
        try:
            while data := await self._receive():
                output += data
                if len(output) > MAX_REPLY_BYTES:
                    raise AgentFaultError(f"the agent printed more than {MAX_REPLY_BYTES:,} bytes")
        finally:
            sending.cancel()
            await asyncio.wait({sending})
            if not sending.cancelled():
                sending.exception()  # it did not read its task: its status says whether that is a fault
        exited = await self._exit()
        if exited != describe_exit(0):
            raise AgentFaultError(f"the agent's command {exited}")
        lines = output.decode("utf-8", "replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        with suppress(ValueError, RecursionError):
            return json.loads(last)
        return last or None

    def count_children(self) -> int:
        """Running processes that it started, also those that left its session; 0 where the system cannot tell."""
        if not SUPERVISION_AVAILABLE or not self.alive:
            return 0
        return max(0, sum(1 for _ in members_of(self.pid)) - 1)  # the supervisor's child is the worker

    def kill(self) -> None:
        """Kill it with everything it started, from any thread."""
        with self._lock:
            self._killed = True
            if self._exit_text is None:
                self._process.kill()

    async def _send(self, data: bytes, *, last: bool = False) -> None:
        loop, channel = asyncio.get_running_loop(), self._process.channel
        try:
            await loop.sock_sendall(channel, data)
            if last:
                channel.shutdown(1)  # it reads to the end of its input
        except OSError:
            raise AgentDiedError(f"the agent's process {await self._exit()}") from None

    async def _receive(self) -> bytes:
        try:
            return await asyncio.get_running_loop().sock_recv(self._process.channel, 1 << 18)
        except OSError:
            return b""

    async def _receive_frame(self) -> dict[str, Any]:
        try:
            while (reply := self._reader.next()) is None:
                data = await self._receive()
                if not data:
                    raise AgentDiedError(f"the agent's process {await self._exit()}")
                self._reader.feed(data)
        except WorkerFault as fault:
            raise AgentDiedError(f"the agent's process sent invalid data: {fault.message}") from None
        return dict(reply)

    async def _exit(self) -> str:
        """How it ended, as soon as that is known."""
        until = asyncio.get_running_loop().time() + EXIT_WAIT_S
        while self._exit_text is None and asyncio.get_running_loop().time() < until:  # noqa: ASYNC110 (set by a thread)
            await asyncio.sleep(0.002)
        return self._exit_text or "closed its channel"

    def _watch(self) -> None:
        """Log what it prints until it ends; then clean up."""
        process = self._process
        process.watch_exit()
        with suppress(OSError), os.fdopen(os.dup(process.output), "rb") as output:
            os.set_blocking(output.fileno(), True)
            for line in iter(lambda: output.readline(1 << 16), b""):
                self._lines += 1
                if self._lines <= MAX_LOGGED_LINES:
                    log.info("%s: %s", self.name, line.decode("utf-8", "replace").rstrip()[:MAX_LINE_CHARS])
        while not process.has_exited(EXIT_WAIT_S):
            continue
        with self._lock:
            if not self._killed:  # else its supervisor was asked to end everything
                with suppress(OSError):
                    process.sweep()
            code = process.popen.wait()
            self._exit_text = describe_exit(code) if code is not None else "is gone"
            process.close_pipes()
            if process.exit_fd is not None:
                os.close(process.exit_fd)

    def release(self) -> None:
        """Close its socket: nobody talks to it any more."""
        self._process.channel.close()

    def close(self) -> None:
        """End it, and wait for that."""
        self.kill()
        self.thread.join(2.0)
        self.release()


def worker_command(python: str) -> list[str]:
    """The command that starts `agent_worker.py` in another environment; its argument is added."""
    return [python, "-u", str(Path(agent_worker.__file__))]
