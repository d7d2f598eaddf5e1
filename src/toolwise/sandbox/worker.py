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

from toolwise.rewards.printed import Printed
from toolwise.rewards.signature import Signature
from toolwise.sandbox import frames
from toolwise.sandbox.disk_usage import Disk
from toolwise.sandbox.faults import SandboxError, WorkerFault, read_fault
from toolwise.sandbox.layers.bubblewrap import Monitor
from toolwise.sandbox.layers.hardening import MEBIBYTE, Plan
from toolwise.sandbox.output import Output
from toolwise.sandbox.process_limits import check_processes, left_running, oom_kills
from toolwise.sandbox.processes import Process
from toolwise.sandbox.requests import encoded, is_result, nonsense, unlabelled
from toolwise.sandbox.supervision import Supervised
from toolwise.sandbox.targets import Target
from toolwise.sandbox.usage import places_of

START_S = 60.0
"""How long an interpreter may take to come up on a busy machine; the user's code has not begun by then."""
LARGEST_RESULT = 8 * MEBIBYTE
SLACK_S = 0.5
"""What a worker has, beyond a call's time, to say that the call ran out of it."""
LOOK_S = 0.1
MEASURE_S = 0.01
"""How often a long call's folder is looked at: where the kernel keeps its size, and where it has to be measured."""
GONE_S = 0.2
MOST_READS = 256
"""Of what it printed, after its last answer: a thread that was left behind may print for ever."""

_FOLDER = struct.Struct("i")
_numbers = itertools.count(1)


class Worker:
    """A process that serves one function."""

    def __init__(self, process: Process, plan: Plan, printed: Printed | None = None, target: str = "") -> None:
        self.process, self.plan, self.target, self._on_print = process, plan, target, printed
        self.calls = 0
        self.signature: Signature | None = None
        """What its function takes, once it is loaded."""
        self.layers: dict[str, str] = {}
        self.missing: dict[str, str] = {}
        self.clean = True
        self.loaded_by = 0.0
        """The deadline that loading the user's code set; the first call shares it."""
        self.left = 0
        """How many processes calls left running."""
        self._oom_kills = oom_kills()
        self._disk: Disk | None = None
        self._next_look = 0.0
        self._incoming = frames.Incoming(LARGEST_RESULT)
        self._output = Output()
        self._output.begin(["on import"])  # which may begin before `load` waits for it
        self._poll = select.poll()
        self._poll.register(process.channel, select.POLLIN)
        self._poll.register(process.output, select.POLLIN)
        self._waiting = select.poll()
        self._waiting.register(process.channel, select.POLLIN)

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
        return not alone or isinstance(self.process.popen, Monitor)

    def seal(self, target: Target, path: Sequence[str] = (), *, probe: bool = False) -> None:
        """Waits for the interpreter, and has it harden itself."""
        deadline = time.monotonic() + START_S
        ready = self._next(deadline, "start")
        if ready.get("ready") is not True:
            raise SandboxError("a worker did not start as it should")
        if isinstance(self.process.popen, Supervised):
            self.process.first = int(ready["pid"])
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
        self.loaded_by = time.monotonic() + timeout_s
        try:
            said = self._next(self.loaded_by, "be imported")
            if "fault" in said:
                self._drain()
                fault = read_fault(said["fault"])
                raise WorkerFault(fault.kind, fault.message, fault.traceback + self._output.of())
        finally:
            self._pass_on_output()
        try:
            self.signature = Signature.from_json(said.get("signature"))
        except ValueError:
            raise nonsense() from None

    def probe(self) -> dict[str, Any]:
        return dict(self._next(time.monotonic() + START_S, "be probed").get("probed") or {})

    def call(self, request: dict[str, Any], count: int, timeout_s: float, until: float) -> Iterator[list[Any]]:
        """Answers as they come: one list a call. Stops early where the worker is no longer as it was.

        Each call has `timeout_s`; all of them end by `until`.
        """
        deadline = min(self.loaded_by or time.monotonic() + timeout_s, until)
        number = self._ask(request, deadline)
        try:
            for position in range(count):
                said = self._next(deadline, "answer")
                if said.get("at") != position:
                    raise nonsense()
                if position == count - 1:
                    self._look_at_folder()
                yield self._answers_in(said, number, position)
                if said.get("tainted") is not False:
                    return
                deadline = min(time.monotonic() + timeout_s, until)
            self._look_after()
        finally:
            self._pass_on_output()

    def call_overlapping(
        self, calls: Sequence[dict[str, Any]], timeout_s: float, until: float
    ) -> Iterator[tuple[int, list[Any]]]:
        """Answers of async calls that run at the same time, as they come, each with the position of its call.

        The worker itself ends a call that waits too long. One that keeps it from answering anything ends with it. Where
        a call has changed what all of them share, neither the answer at hand nor a later one counts, and none comes.
        """
        number = self._ask({"calls": list(calls), "overlap_s": timeout_s}, until)
        missing = set(range(len(calls)))
        try:
            while missing:
                said = self._next(min(time.monotonic() + timeout_s + SLACK_S, until), "answer")
                position = said.get("at")
                if not isinstance(position, int) or position not in missing:
                    raise nonsense()
                missing.discard(position)
                if not missing:
                    self._look_at_folder()
                answers = self._answers_in(said, number, position)
                if said.get("tainted") is not False:
                    return
                yield position, answers
            self._end_overlapping(number)
        finally:
            self._pass_on_output()

    def _end_overlapping(self, number: str) -> None:
        """How the worker is after all of its calls; what was answered counts in any case."""
        try:
            said = self._next(time.monotonic() + SLACK_S, "come to rest")
        except WorkerFault:
            self.clean = False
            return
        self.clean &= said.get("id") == number and said.get("tainted") is False
        self._look_after()

    def _ask(self, request: dict[str, Any], deadline: float) -> str:
        """Sends calls; the labels of their prints stay here."""
        self.loaded_by, self._next_look = 0.0, time.monotonic() + MEASURE_S
        number = f"{next(_numbers)}-{os.urandom(8).hex()}"
        plain, labels = unlabelled(request)
        self._output.begin(labels)
        self._send(encoded({**plain, "id": number, "largest": LARGEST_RESULT}), deadline)
        return number

    def _answers_in(self, said: dict[str, Any], number: str, position: int) -> list[Any]:
        answers = said.get("answers")
        if said.get("id") != number or not isinstance(answers, list):
            raise nonsense()
        self.calls += 1
        if said.get("tainted") is not False or any(not is_result(answer) for answer in answers):
            self.clean = False
            self._drain()
        return [self._with_output(answer, position) for answer in answers]

    def _pass_on_output(self) -> None:
        for _ in range(MOST_READS):
            if not self._drain():
                break
        for label, text in self._output.take():
            if self._on_print is not None:
                self._on_print(label, text)

    def _look_after(self) -> None:
        """After the last answer: threads left behind, bytes nobody asked for, files in the folder."""
        if self._incoming.torn:
            self.clean = False
        threads = self.process.threads()
        if threads is not None and threads > 1:
            time.sleep(0.001)  # a thread that was joined may take a moment to be gone
            self.clean &= self.process.threads() == 1
        if self.may_have_children and (left := left_running(self.process)):
            self.left, self.clean = left, False
        if self.clean and not self._has_empty_folder():
            self.disk.empty()
            self.clean &= self.disk.is_empty(self._places)  # else something without a name is left

    def _has_empty_folder(self) -> bool:
        quickly = self.disk.limited or not self.may_have_children
        return (quickly and self.disk.is_untouched()) or self.disk.is_empty(self._places)

    def is_ready(self) -> bool:
        """Whether it still waits for a call: it is not gone, and nothing came that nobody asked for."""
        return not self._incoming.torn and not self._waiting.poll(0)

    def end(self) -> int:
        try:
            code = self.process.end(sweep=self.may_have_children)
        finally:
            self._let_go_of_disk()
        self.left = max(self.left, self.process.left)
        return code

    def forget(self) -> None:
        """Lets go of what is another process's."""
        self.process.forget()
        self._let_go_of_disk()

    def _let_go_of_disk(self) -> None:
        if self._disk is not None:
            self._disk.close()

    def _send(self, payload: bytes, deadline: float) -> None:
        view = memoryview(frames.framed(payload))
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
                room.poll(min(left, LOOK_S) * 1000)
                self._drain()
            except OSError:
                raise self._unreached(self._death()) from None

    def _unreached(self, fault: WorkerFault) -> WorkerFault:
        fault.unreached = True
        return fault

    def _next(self, deadline: float, what: str) -> dict[str, Any]:
        """The next message from the worker."""
        look = time.monotonic() + LOOK_S
        while True:
            message = self._incoming.next()
            if message is not None:
                return dict(message)
            left = deadline - time.monotonic()
            if left <= 0:
                raise WorkerFault("timeout", f"it took too long to {what}", self._printed())
            every = LOOK_S if self._disk is None or self._disk.limited else MEASURE_S
            ready = self._poll.poll(min(left, every) * 1000)
            if self._disk is not None and time.monotonic() > self._next_look:
                began = time.thread_time()
                self._look_at_folder()
                # A tenth of a core at most.
                self._next_look = time.monotonic() + max(every, 10 * (time.thread_time() - began))
            if time.monotonic() > look:
                self._look_at_processes()
                look = time.monotonic() + LOOK_S
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
            raise self._unreached(self._death()) from None
        except OSError:
            data = b""
        if not data:
            raise self._death()
        self._incoming.feed(data)

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

    def _look_at_folder(self) -> None:
        disk = self.disk
        if (self.may_have_children and not disk.limited) or disk.may_have_grown(self._place):
            too_much = self.disk.is_full(self._places)
            if too_much:
                raise WorkerFault("too_big", too_much)

    @property
    def _place(self) -> str:
        return f"/proc/{self.process.pid}"

    def _places(self) -> Iterable[str]:
        return places_of(self.process.popen, self.process.mark) if self.may_have_children else [self._place]

    def _look_at_processes(self) -> None:
        if self.process.is_stopped() and not (self.layers and self._has_read()):
            raise self._unreached(WorkerFault("timeout", "its process was stopped before it took its call"))
        if self.layers:  # until then it is ours, and in namespaces may still see all processes
            check_processes(self.process, self.plan.memory_mb, children=self.may_have_children)

    def _has_read(self) -> bool:
        """Whether it has taken all that was sent."""
        unread = fcntl.ioctl(self.process.channel, termios.TIOCOUTQ, bytes(4))
        return struct.unpack("i", unread) == (0,)

    def _death(self) -> WorkerFault:
        """Why the channel is closed."""
        end = time.monotonic() + GONE_S
        while self.process.popen.poll() is None and time.monotonic() < end:
            time.sleep(0.001)
        self._drain()
        code, printed = self.process.popen.returncode, self._printed()
        torn = " in the middle of a result" if self._incoming.torn else ""
        if code is None:
            return WorkerFault("died", f"it closed its channel{torn}", printed)
        if code == -signal.SIGXCPU:
            return WorkerFault("timeout", "it used more CPU time than a worker has", printed)
        if code == -signal.SIGSYS:
            return WorkerFault("denied", "it made a system call of another processor's", printed)
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with status {code}"
        return WorkerFault("died", f"its process {how}{torn}{self._by_whom(code)}", printed)

    def _by_whom(self, code: int) -> str:
        if code != -signal.SIGKILL or oom_kills() <= self._oom_kills:
            return ""
        return "; meanwhile the kernel killed a process since the machine or its container was out of memory"

    def _printed(self) -> str:
        return self._output.of()

    def _with_output(self, answer: Any, position: int) -> Any:
        printed = self._output.of(position)
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
