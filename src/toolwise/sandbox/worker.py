"""The trainer's end of one worker: sends calls, waits no longer than the deadline, and believes nothing it reads."""

from __future__ import annotations

import itertools
import os
import select
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from toolwise.rewards.signature import Signature
from toolwise.sandbox import frames
from toolwise.sandbox.faults import SandboxError, WorkerFault, printable, read_fault
from toolwise.sandbox.layers.hardening import MEBIBYTE, Plan
from toolwise.sandbox.processes import Process, remove_folder
from toolwise.sandbox.targets import Target
from toolwise.sandbox.usage import overfilled

START_S = 60.0
"""How long an interpreter may take to come up on a busy machine; the user's code has not begun by then."""
LARGEST_RESULT = 8 * MEBIBYTE
OUTPUT_KEPT = 16 * 1024
LOOK_S = 0.1
"""How often a long call's folder is looked at."""
GONE_S = 0.2

_numbers = itertools.count(1)


class Worker:
    """A process that serves one function."""

    def __init__(self, process: Process, plan: Plan) -> None:
        self.process, self.plan = process, plan
        self.calls = 0
        self.signature: Signature | None = None
        """What its function takes, once it is loaded."""
        self.layers: dict[str, str] = {}
        self.missing: dict[str, str] = {}
        self.clean = True
        self.loaded_by = 0.0
        """The deadline that loading the user's code set; the first call shares it."""
        self._incoming = frames.Incoming(LARGEST_RESULT)
        self._output = bytearray()
        self._dropped = 0
        self._poll = select.poll()
        self._poll.register(process.channel, select.POLLIN)
        self._poll.register(process.output, select.POLLIN)

    @property
    def may_have_children(self) -> bool:
        return "seccomp" not in self.layers or "subprocess" in self.plan.permissions

    def seal(self, target: Target, path: Sequence[str] = (), *, probe: bool = False) -> None:
        """Waits for the interpreter, and has it harden itself."""
        deadline = time.monotonic() + START_S
        if self._next(deadline, "start").get("ready") is not True:
            raise SandboxError("a worker did not start as it should")
        order = {
            "plan": self.plan.to_json(),
            "path": list(path),
            "reference": target.reference,
            "top": target.top,
            "probe": probe,
        }
        self._send(frames.encode(order), deadline)
        said = self._next(deadline, "harden itself")
        self.layers, self.missing = dict(said.get("layers") or {}), dict(said.get("missing") or {})

    def load(self, timeout_s: float) -> None:
        """Waits until the user's code is loaded. The deadline starts here."""
        self.loaded_by = time.monotonic() + timeout_s
        said = self._next(self.loaded_by, "be imported")
        if "fault" in said:
            fault = read_fault(said["fault"])
            raise WorkerFault(fault.kind, fault.message, fault.traceback + self._printed())
        try:
            self.signature = Signature.from_json(said.get("signature"))
        except ValueError:
            raise WorkerFault("bad_type", "the worker sent something else than what it was asked for") from None

    def probe(self) -> dict[str, Any]:
        return dict(self._next(time.monotonic() + START_S, "be probed").get("probed") or {})

    def call(self, request: dict[str, Any], count: int, timeout_s: float, until: float) -> Iterator[list[Any]]:
        """Answers as they come: one list a call. Stops early where the worker is no longer as it was.

        Each call has `timeout_s`; all of them end by `until`.
        """
        number = f"{next(_numbers)}-{os.urandom(8).hex()}"
        deadline = min(self.loaded_by or time.monotonic() + timeout_s, until)
        self.loaded_by = 0.0
        self._output.clear()
        self._dropped = 0
        self._send(_encoded({**request, "id": number, "largest": LARGEST_RESULT}), deadline)
        for position in range(count):
            said = self._next(deadline, "answer")
            if said.get("id") != number or said.get("at") != position or not isinstance(said.get("answers"), list):
                raise WorkerFault("bad_type", "the worker sent something else than what it was asked for")
            self.calls += 1
            if said.get("tainted") is not False or any(not _is_result(answer) for answer in said["answers"]):
                self.clean = False
            yield [self._with_output(answer) for answer in said["answers"]]
            if said.get("tainted") is not False:
                return
            deadline = min(time.monotonic() + timeout_s, until)
        self._look_after()

    def _look_after(self) -> None:
        """After the last answer: threads left behind, bytes nobody asked for, files in the folder."""
        if self._incoming.torn:
            self.clean = False
        threads = self.process.threads()
        if threads is not None and threads > 1:
            time.sleep(0.001)  # a thread that was joined may take a moment to be gone
            self.clean &= self.process.threads() == 1
        if os.listdir(self.process.scratch):
            for entry in self.process.scratch.iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    remove_folder(entry)
                else:
                    entry.unlink(missing_ok=True)

    def end(self) -> int:
        return self.process.end(sweep=self.may_have_children)

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
                select.select([], [channel], [], min(left, LOOK_S))
                self._drain()
            except OSError:
                raise self._death() from None

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
            ready = self._poll.poll(min(left, LOOK_S) * 1000)
            if time.monotonic() > look:
                self._look_at_folder()
                look = time.monotonic() + LOOK_S
            for descriptor, _ in ready:
                if descriptor == self.process.output:
                    self._drain()
                else:
                    self._receive()

    def _receive(self) -> None:
        try:
            data = self.process.channel.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            raise self._death()
        self._incoming.feed(data)

    def _drain(self) -> None:
        """Takes what it printed, so that it never waits for us; keeps the beginning."""
        with suppress(OSError):
            data = os.read(self.process.output, 1 << 16)
            if not data:
                with suppress(KeyError):  # it may have been seen before
                    self._poll.unregister(self.process.output)
                return
            room = OUTPUT_KEPT - len(self._output)
            self._output += data[: max(room, 0)]
            self._dropped += max(len(data) - max(room, 0), 0)

    def _look_at_folder(self) -> None:
        too_much = overfilled([self.process.scratch], self.plan.file_mb)
        if too_much:
            raise WorkerFault("too_big", too_much)

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
        return WorkerFault("died", f"its process {how}{torn}", printed)

    def _printed(self) -> str:
        if not self._output:
            return ""
        more = f"\n… and {self._dropped:,} bytes more" if self._dropped else ""
        return printable(f"\nIt printed:\n{self._output.decode('utf-8', 'replace')}{more}", 2 * OUTPUT_KEPT)

    def _with_output(self, answer: Any) -> Any:
        if self._output and isinstance(answer, dict) and isinstance(answer.get("fault"), dict):
            told = answer["fault"].get("traceback")
            fault = {**answer["fault"], "traceback": (told if isinstance(told, str) else "") + self._printed()}
            return {**answer, "fault": fault}
        return answer


def _encoded(request: dict[str, Any]) -> bytes:
    try:
        return frames.encode(request)
    except (TypeError, ValueError, RecursionError) as fault:
        raise WorkerFault("bad_type", f"its arguments cannot be sent as JSON: {fault}") from None


def _is_result(answer: Any) -> bool:
    return isinstance(answer, dict) and "result" in answer


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
