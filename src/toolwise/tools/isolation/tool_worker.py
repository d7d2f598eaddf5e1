"""The trainer's side of a worker process: requests from any event loop, immediate kill, one thread per worker.

A plain process, not a sandbox: the user's own tools may use the network and files. The other side is
`tool_worker_main.py`.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from toolwise.sandbox import wire
from toolwise.sandbox.faults import WorkerFault
from toolwise.sandbox.layers.kernel import is_stopped
from toolwise.sandbox.process_tree import SUPERVISOR_END_S
from toolwise.sandbox.processes import describe_exit, has_unread_bytes
from toolwise.tools.call_errors import DIED, ToolCallError
from toolwise.tools.isolation.code_location import ModuleRef
from toolwise.tools.isolation.core_time import CpuUsage
from toolwise.tools.isolation.tool_process import MAX_RESULT_BYTES, ToolProcess, Zygote, start_tool_process

log = logging.getLogger("toolwise.tools")

LOAD_TIMEOUT_S = 120.0
"""How long an interpreter and the tool's imports may take to load on a busy machine."""
MAX_LOGGED_LINES = 100
"""Lines logged per call; the rest is read, so that the call never blocks on output, and dropped."""
MAX_LINE_BYTES = 8192
EXIT_WAIT_S = 1.0
STOP_CHECK_S = 0.2
"""A call without an answer is checked after this time: its process may have been stopped before reading it."""
RESOURCE_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)

_call_ids = itertools.count(1)


class ToolDied(ToolCallError):  # noqa: N818 (an outcome of a call, not a user error)
    """The process that ran a tool died or never started: an infrastructure failure, not one of the tool."""

    def __init__(self, text: str) -> None:
        super().__init__(text, DIED)


class LoadFault(ToolDied):
    """The tool's module does not load in a worker; another worker would fail too."""


class ResourcesExhausted(ToolDied):
    """Descriptors, processes or memory are exhausted; a worker can start once another has ended."""


class CallNotDelivered(ToolDied):
    """The process died or was stopped before it read the call; another worker may run it."""


class ToolFault(Exception):  # noqa: N818 (named as what the tool raised)
    """An exception raised by a tool in its worker. Its class has the name of the original exception."""

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> ToolFault:
        kind = type(str(fields.get("type") or "Exception"), (cls,), {})
        fault: ToolFault = kind(str(fields.get("message") or ""))
        fault.add_note(str(fields.get("traceback") or ""))
        return fault


class ToolWorker:
    """A process that has loaded one module, and the thread that manages it.

    The thread does everything that blocks: it starts the process (a fork of `zygote` if there is one), waits until it
    has loaded, logs its output, and cleans up after it and everything it started. It calls `on_started` and `on_ended`.
    """

    def __init__(
        self,
        module_ref: ModuleRef,
        on_started: Callable[[ToolWorker], None],
        on_ended: Callable[[ToolWorker, ToolDied | None], None],
        zygote: Zygote | None = None,
    ) -> None:
        self.module_ref, self.zygote = module_ref, zygote
        self.forkable = False
        """Whether its module can be shared: then others may be forked from it (`become_zygote`)."""
        self.call_started_at: float | None = None
        self._on_started, self._on_ended = on_started, on_ended
        self._lock = threading.Lock()
        self._process: ToolProcess | None = None
        self._pid: int | None = None
        self._frame_reader = wire.FrameReader(MAX_RESULT_BYTES + 4096)
        self._in_call = self._killed = self._reaped = False
        self._exit_text: str | None = None
        self._cpu_usage: CpuUsage | None = None
        self._idle: select.poll | None = None
        self._lines = 0
        self._text = b""
        self.thread = threading.Thread(target=self._run_thread, name="toolwise-tool-worker", daemon=True)
        self.thread.start()

    @property
    def pid(self) -> int | None:
        """Its pid; that of its supervisor until it has loaded."""
        return self._pid or (None if self._process is None else self._process.pid)

    @property
    def was_killed(self) -> bool:
        """Whether something other than us killed it, for example the kernel when out of memory."""
        return not self._killed and self._exit_text == describe_exit(-signal.SIGKILL)

    def is_ready(self) -> bool:
        """Whether it waits for a call: it is alive, and has sent nothing unrequested."""
        return self._idle is not None and not self._idle.poll(0)

    async def request(self, message: dict[str, Any]) -> Any:
        """Send one request and return the answer. Cancelling it kills the process, whatever it is doing."""
        call_id = next(_call_ids)
        try:
            payload = wire.encode({**message, "id": call_id})
        except (TypeError, ValueError, RecursionError) as fault:
            raise ToolFault(f"its arguments cannot be sent as JSON: {fault}") from None
        self._lines = 0
        with self._lock:
            self._in_call = True
        try:
            reply = await self._exchange(wire.to_frame(payload))
            if reply.get("id") != call_id:
                raise ToolDied("the tool's process sent an unexpected reply")
        except BaseException:
            self.kill()
            raise
        finally:
            self.call_started_at = None
            with self._lock:
                self._in_call = False
                self._close_channel()
        if "fault" in reply:
            raise ToolFault.read(reply["fault"] if isinstance(reply["fault"], dict) else {})
        return reply.get("value")

    async def _exchange(self, payload: bytes) -> dict[str, Any]:
        assert self._process is not None
        loop, channel = asyncio.get_running_loop(), self._process.channel
        stop_check = loop.call_later(STOP_CHECK_S, self._kill_if_stopped)
        try:
            await loop.sock_sendall(channel, payload)
            self.call_started_at = time.monotonic()
            while (reply := self._frame_reader.next()) is None:
                data = await loop.sock_recv(channel, 1 << 18)
                if not data:
                    raise ConnectionError
                self._frame_reader.feed(data)
            return dict(reply)
        except WorkerFault as fault:
            raise ToolDied(f"the tool's process sent invalid data: {fault.message}") from None
        except OSError as fault:
            stop_check.cancel()
            until = time.monotonic() + EXIT_WAIT_S
            while self._exit_text is None and time.monotonic() < until:  # noqa: ASYNC110 (set by a thread, no event)
                await asyncio.sleep(0.002)
            # The kernel reports these if the process ended with unread data; had it read the call, we would see an EOF.
            unread = isinstance(fault, BrokenPipeError | ConnectionResetError)
            kind, when = (CallNotDelivered, " before the call reached it") if unread else (ToolDied, "")
            raise kind(f"the tool's process {self._exit_text or 'closed its channel'}{when}") from None
        finally:
            stop_check.cancel()

    def _kill_if_stopped(self) -> None:
        """Kill a process that was stopped before reading its call: it would block the call for ever."""
        with self._lock:
            if self._process is None or self._exit_text is not None or self._pid is None or not is_stopped(self._pid):
                return
            unread = has_unread_bytes(self._process.channel)
        if unread:
            self.kill()

    def become_zygote(self) -> Zygote:
        """From now on it answers no calls, and forks workers."""
        assert self._process is not None
        self._process.channel.send(wire.to_frame(wire.encode({"fork_workers": True})))
        assert self._pid is not None  # it has loaded
        return Zygote(self._process, self._pid)

    def is_computing(self) -> bool:
        """Whether its call has computed or waited for a core since the last check; False if it sleeps, for example
        waiting for a server or a disk."""
        return self._cpu_usage is None or self._cpu_usage.is_computing(self.call_started_at or 0.0)

    def kill(self) -> None:
        """Kill it immediately, from any thread. The worker's thread cleans up."""
        with self._lock:
            self._killed = True
            self._kill_process()

    def _kill_process(self) -> None:
        if self._process is not None and not self._reaped:  # after that the pid may be reused
            self._process.kill()

    def close_after_fork(self) -> None:
        """In a forked child: the process belongs to the parent, so close our copies of its descriptors."""
        if self._process is not None:
            self._process.close_fds()

    def _run_thread(self) -> None:
        fault: ToolDied | None = None
        try:
            process = self._start()
            fault = self._listen(process, loading=True)
            if fault is None:
                self._cpu_usage = CpuUsage(self.pid) if self.pid is not None else None
                self._idle = select.poll()
                self._idle.register(process.channel, select.POLLIN)
                self._on_started(self)
                self._listen(process, loading=False)
        except OSError as refused:
            kind = ResourcesExhausted if refused.errno in RESOURCE_ERRNOS else ToolDied
            fault = kind(f"no worker process can be started for {self.module_ref}: {refused}")
        finally:
            try:
                self._clean_up()
            finally:
                self._on_ended(self, fault)

    def _start(self) -> ToolProcess:
        process = start_tool_process(self.module_ref) if self.zygote is None else self.zygote.fork()
        with self._lock:
            self._process = process
            if self._killed:
                self._kill_process()
        process.watch_exit()  # opened now: later there may be no descriptor left
        return process

    def _listen(self, process: ToolProcess, *, loading: bool) -> ToolDied | None:
        """Log its output until it ends; while `loading`, until it reports success (None) or the reason of a failure."""
        output, channel = process.output, process.channel.fileno()
        until = time.monotonic() + LOAD_TIMEOUT_S if loading else None
        poll = select.poll()
        for descriptor in (output, process.exit_fd, channel if loading else None):
            if descriptor is not None:
                poll.register(descriptor, select.POLLIN)
        tick_ms = None if process.exit_fd is not None else 100
        while not process.has_exited():
            if until is not None and time.monotonic() > until:
                kind = LoadFault if self.zygote is None else ToolDied
                return kind(f"{self.module_ref} took longer than {LOAD_TIMEOUT_S:g} s to load in a worker process")
            for descriptor, _ in poll.poll(tick_ms if until is None else 1000):
                if descriptor == output and not self._log_output(output):
                    poll.unregister(output)
                elif descriptor == channel and (report := self._read_load_message(process)) is not None:
                    return self._load_fault(report)
        while self._log_output(output):
            pass
        # It may have ended right after reporting why.
        return self._load_fault(self._read_load_message(process)) if loading else None

    def _read_load_message(self, process: ToolProcess) -> dict[str, Any] | None:
        """The report on loading; {} if it has closed its channel, None if there is no report yet."""
        try:
            data = process.channel.recv(1 << 18)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        self._frame_reader.feed(data)
        with suppress(WorkerFault):
            report = self._frame_reader.next()
            if report is not None:
                return dict(report)
        return None if data else {}

    def _load_fault(self, report: Mapping[str, Any] | None) -> ToolDied | None:
        if report and "loaded" in report:
            self.forkable, self._pid = bool(report.get("forks")), int(report["pid"])
            return None
        if report and "failed" in report:
            return LoadFault(f"{self.module_ref} does not load in a worker process: {report['failed']}")
        return ToolDied(f"the tool's process ended while it loaded {self.module_ref}")

    def _log_output(self, output: int) -> bool:
        """False when there is no more output."""
        try:
            data = os.read(output, 1 << 16)
        except BlockingIOError:
            return False
        *lines, self._text = (self._text + data).split(b"\n")
        if len(self._text) > MAX_LINE_BYTES or not data:
            lines, self._text = [*lines, self._text], b""
        for line in filter(None, lines):
            self._lines += 1
            if self._lines <= MAX_LOGGED_LINES:
                log.info("%s: %s", self.module_ref, line[:MAX_LINE_BYTES].decode("utf-8", "replace"))
            elif self._lines == MAX_LOGGED_LINES + 1:
                log.info("%s prints more than %d lines: the rest is dropped", self.module_ref, MAX_LOGGED_LINES)
        return bool(data)

    def _clean_up(self) -> None:
        process = self._process
        if process is None:
            self._exit_text = "never started"
            return
        with self._lock:
            self._kill_process()
            process.close_pipes()  # first: the next steps need descriptors, and there may be none left
        if process.exit_fd is not None:
            process.has_exited(SUPERVISOR_END_S)  # its supervisor ends the processes it started
            os.close(process.exit_fd)
        if not self._killed:  # else its supervisor was asked to end everything, and has
            with suppress(OSError):
                process.sweep()
        with self._lock:
            self._reaped = True
        code = process.popen.wait()
        with self._lock:
            with suppress(OSError):
                process.channel.shutdown(socket.SHUT_RDWR)  # wakes a pending call even if a fork holds the socket
            self._exit_text = describe_exit(code) if code is not None else "is gone"
            self._close_channel()

    def _close_channel(self) -> None:
        """Closed by the last user: a descriptor that an event loop still watches must not be reused."""
        if self._exit_text is not None and not self._in_call and self._process is not None:
            self._process.channel.close()
