"""The trainer's end of one worker: sends calls, enforces deadlines and validates everything it reads."""

from __future__ import annotations

import itertools
import os
import select
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from toolwise.rewards.function import Signature
from toolwise.rewards.printed_output import PrintCallback
from toolwise.sandbox import wire
from toolwise.sandbox.disk_usage import Disk
from toolwise.sandbox.faults import SandboxError, WorkerFault, read_fault
from toolwise.sandbox.layers.hardening import MEBIBYTE, Plan
from toolwise.sandbox.layers.kernel import wait_ready
from toolwise.sandbox.output import Output
from toolwise.sandbox.process_limits import (
    CHECK_INTERVAL_S,
    MEASURE_INTERVAL_S,
    START_S,
    check_processes,
    count_leftovers,
    oom_kills,
)
from toolwise.sandbox.process_tree import NamespacedTree, SupervisedTree, last_pid
from toolwise.sandbox.processes import Process, describe_exit, has_unread_bytes, receive_descriptors
from toolwise.sandbox.targets import Target
from toolwise.sandbox.wire import encode_request, protocol_fault, split_labels

MAX_RESULT_BYTES = 8 * MEBIBYTE
ANSWER_GRACE_S = 0.5
"""Extra time for a worker to report that a call timed out."""
EXIT_WAIT_S = 0.2
MAX_READS = 256
"""Limit on reads of its output after the last answer: a leftover thread may print forever."""

_numbers = itertools.count(1)


class Worker:
    """A worker process that serves one function."""

    def __init__(self, process: Process, plan: Plan, on_print: PrintCallback | None = None, target: str = "") -> None:
        self.process, self.plan, self.target, self._on_print = process, plan, target, on_print
        self.calls = 0
        self.signature: Signature | None = None  # once it is loaded
        self.layers: dict[str, str] = {}
        self.missing: dict[str, str] = {}
        self.clean = True
        self.load_deadline = 0.0
        """The deadline for loading the user code; the first call shares it."""
        self.leftover_count = 0
        """Number of processes that calls left running."""
        self._oom_kills, self._last_pid = oom_kills(), last_pid()
        self._disk: Disk | None = None
        self._next_folder_check = 0.0
        self._frame_reader = wire.FrameReader(MAX_RESULT_BYTES)
        self._output = Output()
        self._output.begin(["on import"])  # the import may start before `load` is called
        self._poll = select.poll()
        self._poll.register(process.channel, select.POLLIN)
        self._poll.register(process.output, select.POLLIN)

    @property
    def disk(self) -> Disk:
        """Its folder, as the worker sees it if it has sent a descriptor."""
        if self._disk is None:
            self._disk = Disk([self.process.scratch], self.plan.file_mb)
        return self._disk

    @property
    def may_have_children(self) -> bool:
        """Whether there may be more than one process; under bubblewrap the worker itself is a child."""
        alone = "seccomp" in self.layers and "subprocess" not in self.plan.permissions
        return not alone or isinstance(self.process.popen, NamespacedTree)

    def seal(self, target: Target, path: Sequence[str] = (), *, probe: bool = False) -> None:
        """Wait for the interpreter to start and make it harden itself."""
        deadline = time.monotonic() + START_S
        ready = self._next(deadline, "start")
        if ready.get("ready") is not True:
            raise SandboxError("a worker did not start correctly")
        if isinstance(self.process.popen, SupervisedTree):
            self.process.supervised_pid = int(ready["pid"])
        order = {
            "plan": self.plan.to_json(),
            "path": list(path),
            "reference": target.reference,
            "top": target.top,
            "probe": probe,
        }
        self._send(wire.encode(order), deadline)
        self._next(deadline, "send its folder")
        reply = self._next(deadline, "harden itself")
        self.layers, self.missing = dict(reply.get("layers") or {}), dict(reply.get("missing") or {})
        self._disk = self.disk  # before any user code runs

    def load(self, timeout_s: float) -> None:
        """Wait until the user code is loaded. The deadline starts here."""
        self.load_deadline = time.monotonic() + timeout_s
        try:
            reply = self._next(self.load_deadline, "be imported")
            if "fault" in reply:
                self._drain()
                fault = read_fault(reply["fault"])
                raise WorkerFault(fault.kind, fault.message, fault.traceback + self._output.format_printed())
        finally:
            self._forward_output()
        try:
            self.signature = Signature.from_json(reply.get("signature"))
        except ValueError:
            raise protocol_fault() from None

    def probe(self) -> dict[str, Any]:
        return dict(self._next(time.monotonic() + START_S, "be probed").get("probed") or {})

    def call(self, request: dict[str, Any], count: int, timeout_s: float, until: float) -> Iterator[list[Any]]:
        """Yield answers as they arrive, one list per call. Stops early once a call has changed the worker's state.

        Each call has `timeout_s`; all of them must end by `until`.
        """
        deadline = min(self.load_deadline or time.monotonic() + timeout_s, until)
        number = self._send_calls(request, deadline)
        try:
            for position in range(count):
                reply = self._next(deadline, "answer")
                if reply.get("at") != position:
                    raise protocol_fault()
                if position == count - 1:
                    self._check_folder()
                yield self._parse_answers(reply, number, position)
                if reply.get("state_changed") is not False:
                    return
                deadline = min(time.monotonic() + timeout_s, until)
            self._check_leftovers()
        finally:
            self._forward_output()

    def call_overlapping(
        self, calls: Sequence[dict[str, Any]], timeout_s: float, until: float
    ) -> Iterator[tuple[int, list[Any]]]:
        """Yield the answers of concurrent async calls as they arrive, each with the position of its call.

        The worker itself cancels a call that waits too long; a call that blocks the worker is killed with it. Once a
        call has changed state that all of them share, the current answer is dropped and no more are yielded.
        """
        number = self._send_calls({"calls": list(calls), "overlap_s": timeout_s}, until)
        missing = set(range(len(calls)))
        try:
            while missing:
                reply = self._next(min(time.monotonic() + timeout_s + ANSWER_GRACE_S, until), "answer")
                position = reply.get("at")
                if not isinstance(position, int) or position not in missing:
                    raise protocol_fault()
                missing.discard(position)
                if not missing:
                    self._check_folder()
                answers = self._parse_answers(reply, number, position)
                if reply.get("state_changed") is not False:
                    return
                yield position, answers
            self._end_overlapping(number)
        finally:
            self._forward_output()

    def _end_overlapping(self, number: str) -> None:
        """Read the worker's state after all calls; the answers so far count either way."""
        try:
            reply = self._next(time.monotonic() + ANSWER_GRACE_S, "become idle")
        except WorkerFault:
            self.clean = False
            return
        self.clean &= reply.get("id") == number and reply.get("state_changed") is False
        self._check_leftovers()

    def _send_calls(self, request: dict[str, Any], deadline: float) -> str:
        """Send calls; the labels for their output stay here."""
        self.load_deadline, self._next_folder_check = 0.0, time.monotonic() + MEASURE_INTERVAL_S
        number = f"{next(_numbers)}-{os.urandom(8).hex()}"
        plain, labels = split_labels(request)
        self._output.begin(labels)
        self._send(encode_request({**plain, "id": number, "largest": MAX_RESULT_BYTES}), deadline)
        return number

    def _parse_answers(self, reply: dict[str, Any], number: str, position: int) -> list[Any]:
        answers = reply.get("answers")
        if reply.get("id") != number or not isinstance(answers, list):
            raise protocol_fault()
        self.calls += 1
        all_results = all(isinstance(answer, dict) and "result" in answer for answer in answers)
        if reply.get("state_changed") is not False or not all_results:
            self.clean = False
            self._drain()
        return [self._with_output(answer, position) for answer in answers]

    def _forward_output(self) -> None:
        for _ in range(MAX_READS):
            if not self._drain():
                break
        for label, text in self._output.take():
            if self._on_print is not None:
                self._on_print(label, text)

    def _check_leftovers(self) -> None:
        """After the last answer, check for leftover threads, processes, unexpected bytes and files."""
        if self._frame_reader.torn:
            self.clean = False
        if (self.process.threads() or 1) > 1:
            time.sleep(0.001)  # a joined thread may take a moment to disappear
            self.clean &= self.process.threads() == 1
        if self.may_have_children:
            self.leftover_count, self._last_pid = count_leftovers(self.process, self._last_pid)
            self.clean &= not self.leftover_count
        quick_check_is_enough = self.disk.limited or not self.may_have_children
        if self.clean and not (
            (quick_check_is_enough and self.disk.is_untouched()) or self.disk.is_empty(self._proc_folders)
        ):
            self.disk.empty()
            self.clean &= self.disk.is_empty(self._proc_folders)  # else an unlinked file is left

    def is_ready(self) -> bool:
        """Whether it still waits for a call: alive, and without unexpected output."""
        return not self._frame_reader.torn and not wait_ready(self.process.channel.fileno(), 0)

    def end(self) -> int:
        try:
            return self.process.end(sweep=self.may_have_children)
        finally:
            self._close_disk()
            self.leftover_count = max(self.leftover_count, self.process.popen.leftover_count or 0)

    def close_fds(self) -> None:
        self.process.close_fds()
        self._close_disk()

    def _close_disk(self) -> None:
        if self._disk is not None:
            self._disk.close()

    def _send(self, payload: bytes, deadline: float) -> None:
        view = memoryview(wire.to_frame(payload))
        channel = self.process.channel
        while view:
            try:
                view = view[channel.send(view) :]
            except BlockingIOError:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise WorkerFault("timeout", "it did not read its call in time") from None
                wait_ready(channel.fileno(), min(left, CHECK_INTERVAL_S), select.POLLOUT)
                self._drain()
            except OSError:
                raise self._death_fault(not_received=True) from None

    def _next(self, deadline: float, what: str) -> dict[str, Any]:
        next_check = time.monotonic() + CHECK_INTERVAL_S
        while True:
            message = self._frame_reader.next()
            if message is not None:
                return dict(message)
            left = deadline - time.monotonic()
            if left <= 0:
                raise WorkerFault("timeout", f"it took too long to {what}", self._output.format_printed())
            interval = CHECK_INTERVAL_S if self._disk is None or self._disk.limited else MEASURE_INTERVAL_S
            ready = self._poll.poll(min(left, interval) * 1000)
            if self._disk is not None and time.monotonic() > self._next_folder_check:
                cpu_before = time.thread_time()
                self._check_folder()
                # At most a tenth of a core.
                self._next_folder_check = time.monotonic() + max(interval, 10 * (time.thread_time() - cpu_before))
            if time.monotonic() > next_check:
                self._check_processes()
                next_check = time.monotonic() + CHECK_INTERVAL_S
            for descriptor, _ in ready:
                if descriptor == self.process.output:
                    self._drain()
                else:
                    self._receive()

    def _receive(self) -> None:
        try:
            if self._disk is not None:
                data = self.process.channel.recv(1 << 18)
            else:  # before user code runs, a descriptor of the worker's folder may come with the data
                data, folders = receive_descriptors(self.process.channel, 1 << 18, 1)
                if folders:
                    self._disk = Disk([self.process.scratch], self.plan.file_mb, folders)
        except BlockingIOError:
            return
        except ConnectionResetError:  # it ended with unread data
            raise self._death_fault(not_received=True) from None
        except OSError:
            data = b""
        if not data:
            raise self._death_fault()
        self._frame_reader.feed(data)

    def _drain(self) -> bool:
        """Read what it printed, so that it never blocks on us. False if there is nothing now or at all any more."""
        try:
            data = os.read(self.process.output, 1 << 16)
        except OSError:
            return False
        if not data:
            with suppress(KeyError):  # already unregistered
                self._poll.unregister(self.process.output)
        self._output.feed(data)
        return bool(data)

    def _check_folder(self) -> None:
        if (self.may_have_children and not self.disk.limited) or self.disk.may_have_grown(self._proc_folder):
            reason = self.disk.overflow_reason(self._proc_folders)
            if reason:
                raise WorkerFault("too_big", reason)

    @property
    def _proc_folder(self) -> str:
        return f"/proc/{self.process.pid}"

    def _proc_folders(self) -> Iterable[str]:
        return self.process.popen.proc_folders() if self.may_have_children else [self._proc_folder]

    def _check_processes(self) -> None:
        if self.process.is_stopped() and (not self.layers or has_unread_bytes(self.process.channel)):
            raise WorkerFault("timeout", "its process was stopped before it read its call", not_received=True)
        if self.layers:  # before that it runs only our code, and in namespaces may still see all processes
            check_processes(self.process, self.plan.memory_mb, children=self.may_have_children)

    def _death_fault(self, *, not_received: bool = False) -> WorkerFault:
        """Why the channel is closed."""
        end = time.monotonic() + EXIT_WAIT_S
        while self.process.popen.poll() is None and time.monotonic() < end:
            time.sleep(0.001)
        self._drain()
        code, kind = self.process.popen.returncode, "died"
        torn = " in the middle of a result" if self._frame_reader.torn else ""
        message = f"it closed its channel{torn}" if code is None else f"its process {describe_exit(code)}{torn}"
        if code == -signal.SIGXCPU:
            kind, message = "timeout", "it exceeded the CPU time limit of a worker"
        elif code == -signal.SIGSYS:
            kind, message = "denied", "it made a system call for a different CPU architecture"
        elif code == -signal.SIGKILL and oom_kills() > self._oom_kills:
            message += "; meanwhile the kernel killed a process because the machine or its container was out of memory"
        return WorkerFault(kind, message, self._output.format_printed(), not_received=not_received)

    def _with_output(self, answer: Any, position: int) -> Any:
        printed = self._output.format_printed(position)
        if printed and isinstance(answer, dict) and isinstance(answer.get("fault"), dict):
            traceback = answer["fault"].get("traceback")
            fault = {**answer["fault"], "traceback": (traceback if isinstance(traceback, str) else "") + printed}
            return {**answer, "fault": fault}
        return answer
