"""The trainer's end of one worker: sends calls, waits no longer than the deadline, and believes nothing it reads."""

from __future__ import annotations

import fcntl
import itertools
import os
import select
import signal
import socket
import struct
import termios
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from toolwise.rewards.printed_output import PrintCallback
from toolwise.rewards.signature import Signature
from toolwise.sandbox import frames
from toolwise.sandbox.disk_usage import Disk
from toolwise.sandbox.faults import SandboxError, WorkerFault, read_fault
from toolwise.sandbox.layers.bubblewrap import BwrapProcess
from toolwise.sandbox.layers.hardening import MEBIBYTE, Plan
from toolwise.sandbox.output import Output
from toolwise.sandbox.process_limits import check_processes, count_leftovers, oom_kills
from toolwise.sandbox.process_usage import proc_folders_of
from toolwise.sandbox.processes import Process
from toolwise.sandbox.requests import encode_request, is_result, protocol_fault, split_labels
from toolwise.sandbox.supervisor_client import SupervisedProcess, last_pid
from toolwise.sandbox.targets import Target

START_S = 60.0
"""How long an interpreter may take to come up on a busy machine; the user's code has not begun by then."""
MAX_RESULT_BYTES = 8 * MEBIBYTE
ANSWER_GRACE_S = 0.5
"""What a worker has, beyond a call's time, to say that the call ran out of it."""
CHECK_INTERVAL_S = 0.1
MEASURE_INTERVAL_S = 0.01
"""How often a long call's folder is looked at: where the kernel keeps its size, and where it has to be measured."""
EXIT_WAIT_S = 0.2
MAX_READS = 256
"""Of what it printed, after its last answer: a thread that was left behind may print for ever."""

_FOLDER = struct.Struct("i")
_numbers = itertools.count(1)


class Worker:
    """A process that serves one function."""

    def __init__(self, process: Process, plan: Plan, on_print: PrintCallback | None = None, target: str = "") -> None:
        self.process, self.plan, self.target, self._on_print = process, plan, target, on_print
        self.calls = 0
        self.signature: Signature | None = None
        """What its function takes, once it is loaded."""
        self.layers: dict[str, str] = {}
        self.missing: dict[str, str] = {}
        self.clean = True
        self.load_deadline = 0.0
        """The deadline that loading the user's code set; the first call shares it."""
        self.leftover_count = 0
        """How many processes calls left running."""
        self._oom_kills, self._last_pid = oom_kills(), last_pid()
        self._disk: Disk | None = None
        self._next_folder_check = 0.0
        self._frame_reader = frames.FrameReader(MAX_RESULT_BYTES)
        self._output = Output()
        self._output.begin(["on import"])  # which may begin before `load` waits for it
        self._poll = select.poll()
        self._poll.register(process.channel, select.POLLIN)
        self._poll.register(process.output, select.POLLIN)
        self._channel_poll = select.poll()
        self._channel_poll.register(process.channel, select.POLLIN)

    @property
    def disk(self) -> Disk:
        """Its folder, as it sees it itself where it has told so."""
        if self._disk is None:
            self._disk = Disk([self.process.scratch], self.plan.file_mb)
        return self._disk

    @property
    def may_have_children(self) -> bool:
        """Or is one: bubblewrap's."""
        alone = "seccomp" in self.layers and "subprocess" not in self.plan.permissions
        return not alone or isinstance(self.process.popen, BwrapProcess)

    def seal(self, target: Target, path: Sequence[str] = (), *, probe: bool = False) -> None:
        """Waits for the interpreter, and has it harden itself."""
        deadline = time.monotonic() + START_S
        ready = self._next(deadline, "start")
        if ready.get("ready") is not True:
            raise SandboxError("a worker did not start as it should")
        if isinstance(self.process.popen, SupervisedProcess):
            self.process.supervised_pid = int(ready["pid"])
        order = {
            "plan": self.plan.to_json(),
            "path": list(path),
            "reference": target.reference,
            "top": target.top,
            "probe": probe,
        }
        self._send(frames.encode(order), deadline)
        self._next(deadline, "tell its folder")
        said = self._next(deadline, "harden itself")
        self.layers, self.missing = dict(said.get("layers") or {}), dict(said.get("missing") or {})
        self._disk = self.disk  # before a line of the user's code runs

    def load(self, timeout_s: float) -> None:
        """Waits until the user's code is loaded. The deadline starts here."""
        self.load_deadline = time.monotonic() + timeout_s
        try:
            said = self._next(self.load_deadline, "be imported")
            if "fault" in said:
                self._drain()
                fault = read_fault(said["fault"])
                raise WorkerFault(fault.kind, fault.message, fault.traceback + self._output.format_printed())
        finally:
            self._forward_output()
        try:
            self.signature = Signature.from_json(said.get("signature"))
        except ValueError:
            raise protocol_fault() from None

    def probe(self) -> dict[str, Any]:
        return dict(self._next(time.monotonic() + START_S, "be probed").get("probed") or {})

    def call(self, request: dict[str, Any], count: int, timeout_s: float, until: float) -> Iterator[list[Any]]:
        """Answers as they come: one list a call. Stops early where the worker is no longer as it was.

        Each call has `timeout_s`; all of them end by `until`.
        """
        deadline = min(self.load_deadline or time.monotonic() + timeout_s, until)
        number = self._send_calls(request, deadline)
        try:
            for position in range(count):
                said = self._next(deadline, "answer")
                if said.get("at") != position:
                    raise protocol_fault()
                if position == count - 1:
                    self._check_folder()
                yield self._parse_answers(said, number, position)
                if said.get("tainted") is not False:
                    return
                deadline = min(time.monotonic() + timeout_s, until)
            self._check_leftovers()
        finally:
            self._forward_output()

    def call_overlapping(
        self, calls: Sequence[dict[str, Any]], timeout_s: float, until: float
    ) -> Iterator[tuple[int, list[Any]]]:
        """Answers of async calls that run at the same time, as they come, each with the position of its call.

        The worker itself ends a call that waits too long. One that keeps it from answering anything ends with it. Where
        a call has changed what all of them share, neither the answer at hand nor a later one counts, and none comes.
        """
        number = self._send_calls({"calls": list(calls), "overlap_s": timeout_s}, until)
        missing = set(range(len(calls)))
        try:
            while missing:
                said = self._next(min(time.monotonic() + timeout_s + ANSWER_GRACE_S, until), "answer")
                position = said.get("at")
                if not isinstance(position, int) or position not in missing:
                    raise protocol_fault()
                missing.discard(position)
                if not missing:
                    self._check_folder()
                answers = self._parse_answers(said, number, position)
                if said.get("tainted") is not False:
                    return
                yield position, answers
            self._end_overlapping(number)
        finally:
            self._forward_output()

    def _end_overlapping(self, number: str) -> None:
        """How the worker is after all of its calls; what was answered counts in any case."""
        try:
            said = self._next(time.monotonic() + ANSWER_GRACE_S, "come to rest")
        except WorkerFault:
            self.clean = False
            return
        self.clean &= said.get("id") == number and said.get("tainted") is False
        self._check_leftovers()

    def _send_calls(self, request: dict[str, Any], deadline: float) -> str:
        """Sends calls; the labels of their prints stay here."""
        self.load_deadline, self._next_folder_check = 0.0, time.monotonic() + MEASURE_INTERVAL_S
        number = f"{next(_numbers)}-{os.urandom(8).hex()}"
        plain, labels = split_labels(request)
        self._output.begin(labels)
        self._send(encode_request({**plain, "id": number, "largest": MAX_RESULT_BYTES}), deadline)
        return number

    def _parse_answers(self, said: dict[str, Any], number: str, position: int) -> list[Any]:
        answers = said.get("answers")
        if said.get("id") != number or not isinstance(answers, list):
            raise protocol_fault()
        self.calls += 1
        if said.get("tainted") is not False or any(not is_result(answer) for answer in answers):
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
        """After the last answer: threads left behind, bytes nobody asked for, files in the folder."""
        if self._frame_reader.torn:
            self.clean = False
        threads = self.process.threads()
        if threads is not None and threads > 1:
            time.sleep(0.001)  # a thread that was joined may take a moment to be gone
            self.clean &= self.process.threads() == 1
        if self.may_have_children:
            self.leftover_count, self._last_pid = count_leftovers(self.process, self._last_pid)
            self.clean &= not self.leftover_count
        if self.clean and not self._has_empty_folder():
            self.disk.empty()
            self.clean &= self.disk.is_empty(self._proc_folders)  # else something without a name is left

    def _has_empty_folder(self) -> bool:
        quickly = self.disk.limited or not self.may_have_children
        return (quickly and self.disk.is_untouched()) or self.disk.is_empty(self._proc_folders)

    def is_ready(self) -> bool:
        """Whether it still waits for a call: it is not gone, and nothing came that nobody asked for."""
        return not self._frame_reader.torn and not self._channel_poll.poll(0)

    def end(self) -> int:
        try:
            code = self.process.end(sweep=self.may_have_children)
        finally:
            self._close_disk()
        self.leftover_count = max(self.leftover_count, self.process.leftover_count)
        return code

    def close_fds(self) -> None:
        """Lets go of what is another process's."""
        self.process.close_fds()
        self._close_disk()

    def _close_disk(self) -> None:
        if self._disk is not None:
            self._disk.close()

    def _send(self, payload: bytes, deadline: float) -> None:
        view = memoryview(frames.to_frame(payload))
        channel = self.process.channel
        while view:
            try:
                view = view[channel.send(view) :]
            except BlockingIOError:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise WorkerFault("timeout", "it did not take its call in time") from None
                room = select.poll()
                room.register(channel, select.POLLOUT)
                room.poll(min(left, CHECK_INTERVAL_S) * 1000)
                self._drain()
            except OSError:
                raise self._mark_not_received(self._death_fault()) from None

    def _mark_not_received(self, fault: WorkerFault) -> WorkerFault:
        fault.not_received = True
        return fault

    def _next(self, deadline: float, what: str) -> dict[str, Any]:
        """The next message from the worker."""
        look = time.monotonic() + CHECK_INTERVAL_S
        while True:
            message = self._frame_reader.next()
            if message is not None:
                return dict(message)
            left = deadline - time.monotonic()
            if left <= 0:
                raise WorkerFault("timeout", f"it took too long to {what}", self._printed_text())
            every = CHECK_INTERVAL_S if self._disk is None or self._disk.limited else MEASURE_INTERVAL_S
            ready = self._poll.poll(min(left, every) * 1000)
            if self._disk is not None and time.monotonic() > self._next_folder_check:
                began = time.thread_time()
                self._check_folder()
                # A tenth of a core at most.
                self._next_folder_check = time.monotonic() + max(every, 10 * (time.thread_time() - began))
            if time.monotonic() > look:
                self._check_processes()
                look = time.monotonic() + CHECK_INTERVAL_S
            for descriptor, _ in ready:
                if descriptor == self.process.output:
                    self._drain()
                else:
                    self._receive()

    def _receive(self) -> None:
        try:
            data = self.process.channel.recv(1 << 18) if self._disk is not None else self._receive_with_folder()
        except BlockingIOError:
            return
        except ConnectionResetError:  # the kernel's word for an end with something unread
            raise self._mark_not_received(self._death_fault()) from None
        except OSError:
            data = b""
        if not data:
            raise self._death_fault()
        self._frame_reader.feed(data)

    def _drain(self) -> bool:
        """Takes what it printed, so that it never waits for us. False where there is nothing, or nothing more."""
        try:
            data = os.read(self.process.output, 1 << 16)
        except OSError:
            return False
        if not data:
            with suppress(KeyError):  # it may have been seen before
                self._poll.unregister(self.process.output)
        self._output.feed(data)
        return bool(data)

    def _receive_with_folder(self) -> bytes:
        """What a worker says before it runs the user's code: a descriptor of its folder may come with it."""
        flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        data, given, _, _ = self.process.channel.recvmsg(1 << 18, socket.CMSG_SPACE(_FOLDER.size), flags)
        for _, _, packed in given:
            (folder,) = _FOLDER.unpack(packed[: _FOLDER.size])
            self._disk = Disk([self.process.scratch], self.plan.file_mb, [folder])
        return data

    def _check_folder(self) -> None:
        disk = self.disk
        if (self.may_have_children and not disk.limited) or disk.may_have_grown(self._proc_folder):
            too_much = self.disk.overflow_reason(self._proc_folders)
            if too_much:
                raise WorkerFault("too_big", too_much)

    @property
    def _proc_folder(self) -> str:
        return f"/proc/{self.process.pid}"

    def _proc_folders(self) -> Iterable[str]:
        return proc_folders_of(self.process.popen, self.process.mark) if self.may_have_children else [self._proc_folder]

    def _check_processes(self) -> None:
        if self.process.is_stopped() and not (self.layers and self._has_read()):
            raise self._mark_not_received(WorkerFault("timeout", "its process was stopped before it took its call"))
        if self.layers:  # until then it is ours, and in namespaces may still see all processes
            check_processes(self.process, self.plan.memory_mb, children=self.may_have_children)

    def _has_read(self) -> bool:
        """Whether it has taken all that was sent."""
        unread = fcntl.ioctl(self.process.channel, termios.TIOCOUTQ, bytes(4))
        return struct.unpack("i", unread) == (0,)

    def _death_fault(self) -> WorkerFault:
        """Why the channel is closed."""
        end = time.monotonic() + EXIT_WAIT_S
        while self.process.popen.poll() is None and time.monotonic() < end:
            time.sleep(0.001)
        self._drain()
        code, printed = self.process.popen.returncode, self._printed_text()
        torn = " in the middle of a result" if self._frame_reader.torn else ""
        if code is None:
            return WorkerFault("died", f"it closed its channel{torn}", printed)
        if code == -signal.SIGXCPU:
            return WorkerFault("timeout", "it used more CPU time than a worker has", printed)
        if code == -signal.SIGSYS:
            return WorkerFault("denied", "it made a system call of another processor's", printed)
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with status {code}"
        return WorkerFault("died", f"its process {how}{torn}{self._oom_note(code)}", printed)

    def _oom_note(self, code: int) -> str:
        if code != -signal.SIGKILL or oom_kills() <= self._oom_kills:
            return ""
        return "; meanwhile the kernel killed a process since the machine or its container was out of memory"

    def _printed_text(self) -> str:
        return self._output.format_printed()

    def _with_output(self, answer: Any, position: int) -> Any:
        printed = self._output.format_printed(position)
        if printed and isinstance(answer, dict) and isinstance(answer.get("fault"), dict):
            told = answer["fault"].get("traceback")
            fault = {**answer["fault"], "traceback": (told if isinstance(told, str) else "") + printed}
            return {**answer, "fault": fault}
        return answer


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
