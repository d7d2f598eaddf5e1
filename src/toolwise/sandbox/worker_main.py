"""Entry point of a worker process: receives a plan, hardens itself, loads one user function and answers calls.

Started by `processes.py` as `python -I -S -B -c …` in its own session, folder and environment.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any, NoReturn

from pydantic_core import to_json

from toolwise.sandbox import frames
from toolwise.sandbox.harness import Harness, JsonDict, plain_fault, preload_package
from toolwise.sandbox.layers.disk import send_folders
from toolwise.sandbox.layers.hardening import HardeningResult, Plan, harden
from toolwise.sandbox.layers.kernel import die_with_trainer
from toolwise.sandbox.output import MarkedStream, current_call
from toolwise.sandbox.scratch import FOLDER_FLAGS, EmptyFolderCache, empty_folder
from toolwise.sandbox.worker_state import Snapshot

# Saved here, as compiled functions where possible, so that later patches by user code do not affect them.
_getpid, _exit, _write = os.getpid, os._exit, frames.write_all
_open, _close = os.open, os.close
_encode, _framed, _read, _header = to_json, frames.to_frame, frames.read_exactly, frames.HEADER
_decode = json.JSONDecoder().raw_decode
CALL_EMPTY_S = 0.2
"""Time for a worker to empty its folder after a call; a worker that fails is replaced."""
_memory_fault = {"kind": "memory", "message": "it asked for more memory than memory_mb allows"}


def main(start: dict[str, Any]) -> NoReturn:
    """`start`: the channel, the read end of a pipe that the trainer holds open while it lives, and the parent's pid."""
    die_with_trainer(start["life"], start["parent"])
    os.set_inheritable(start["life"], False)
    os.set_inheritable(start["channel"], False)
    sys.argv = [""]
    sys.path[:] = [folder for folder in sys.path if folder in start["keep"]]
    buffer = sys.stdout.buffer  # shared, so that the order of prints is kept
    sys.stdout, sys.stderr = MarkedStream(buffer), MarkedStream(buffer)
    worker = _Worker(start["channel"])
    try:
        worker.serve()
    except BaseException:  # the channel is closed or this process is broken: the trainer sees it exit
        _exit(1)
    _exit(0)


def _allowed(plan: Plan, result: HardeningResult) -> tuple[str, ...]:
    """What this worker does not refuse: failures there must not be blamed on the sandbox."""
    files = () if "landlock" in result.layers else ("files",)
    calls = () if "seccomp" in result.layers else ("calls", "network", "subprocess")
    return (*plan.permissions, *files, *calls)


def _needs_fresh_worker(answer: JsonDict) -> bool:
    """Whether the remaining calls need a fresh worker.

    A call that raised or returned an invalid value does not stop them: they run here, and the worker ends after them.
    """
    return "fault" in answer and answer["fault"]["kind"] not in ("exception", "bad_type", "non_finite", "wrong_length")


class _Worker:
    def __init__(self, channel: int) -> None:
        self._channel, self._pid = channel, _getpid()
        self._snapshot: Snapshot | None = None
        self._scratch, self._empty_since = "", EmptyFolderCache()

    def _send(self, message: JsonDict) -> None:
        if _getpid() != self._pid:  # a process forked by user code has returned into our code
            _exit(0)
        _write(self._channel, _framed(_encode(message)))

    def _receive(self) -> Any:
        head = _read(self._channel, _header.size)
        if len(head) < _header.size:
            _exit(0)
        payload = _read(self._channel, _header.unpack(head)[0])
        return _decode(payload.decode("ascii"))[0]

    def serve(self) -> None:
        self._send({"ready": True, "pid": self._pid})
        order = self._receive()
        plan = Plan.from_json(order["plan"])
        sys.path += order["path"]
        self._scratch, folder_message = plan.scratch, _framed(_encode({"folder": True}))
        result = harden(plan, lambda: send_folders(self._channel, plan.folders, folder_message))
        self._send({"layers": result.layers, "missing": result.missing})
        if order.get("probe"):
            from toolwise.sandbox.layers.probes import probe_layers

            self._send({"probed": probe_layers(plan)})
            return
        harness = self._load(order, _allowed(plan, result))
        while harness is not None:
            self._answer(harness, self._receive())

    def _load(self, order: JsonDict, allowed: tuple[str, ...]) -> Harness | None:
        try:
            if order.get("top"):
                preload_package(order["top"])
            harness = Harness.load(order["reference"], allowed)
        except BaseException as fault:  # user code may raise anything
            self._send(plain_fault(fault, allowed, loading=True))
            return None
        self._snapshot = Snapshot()
        self._send({"signature": harness.reward.signature.to_json()})
        return harness

    def _answer(self, harness: Harness, request: JsonDict) -> None:
        MarkedStream.last = -1
        if harness.reward.mode != "pointwise" and "batch" in request:
            current_call.set(0)
            self._finish(request, harness.call_batch(request["batch"]), 0)
            return
        if "overlap_s" in request:
            self._answer_overlapping(harness, request)
            return
        for position, call in enumerate(request["calls"]):
            current_call.set(position)
            if not self._finish(request, [harness.call_one(call)], position):
                return

    def _answer_overlapping(self, harness: Harness, request: JsonDict) -> None:
        """Send each answer as it arrives, with whether a call has changed shared state. Then send one message without
        answers that reports the worker's state after all calls."""
        from toolwise.sandbox.async_calls import run_overlapping

        assert self._snapshot is not None
        flush, patched, needs_fresh = self._snapshot.flush, self._snapshot.patched, False

        def on_answer(position: int, answer: JsonDict) -> None:
            nonlocal needs_fresh
            needs_fresh |= _needs_fresh_worker(answer)
            flush()
            self._send_answers(request, [answer], position, state_changed=patched())

        calls = request["calls"]
        ended = run_overlapping(harness, calls, request["overlap_s"], on_answer)
        self._finish(request, [], len(calls), state_changed=needs_fresh or not ended)

    def _finish(
        self, request: JsonDict, answers: list[JsonDict], position: int, *, state_changed: bool = False
    ) -> bool:
        """Send a call's answers. False if the call changed the worker's state: the rest goes to a fresh worker."""
        assert self._snapshot is not None
        try:
            self._snapshot.tidy()
            state_changed = (
                state_changed or self._snapshot.changed() or any(_needs_fresh_worker(answer) for answer in answers)
            )
            state_changed = state_changed or not self._empty_folder()
        except MemoryError:
            gc.collect()
            state_changed, answers = True, [{"fault": _memory_fault}]
        return self._send_answers(request, answers, position, state_changed=state_changed)

    def _empty_folder(self) -> bool:
        """Hide a call's files from the next call. False if something is left."""
        try:
            if self._empty_since.is_empty(self._scratch):
                return True
            folder = _open(self._scratch, FOLDER_FLAGS)
            try:
                return empty_folder(folder, CALL_EMPTY_S)
            finally:
                _close(folder)
        except OSError:
            return False

    def _send_answers(self, request: JsonDict, answers: list[JsonDict], position: int, *, state_changed: bool) -> bool:
        max_bytes = request["largest"]
        try:
            payload = _encode({"id": request["id"], "at": position, "answers": answers, "state_changed": state_changed})
        except MemoryError:
            gc.collect()
            state_changed = True
            payload = _encode(
                {"id": request["id"], "at": position, "answers": [{"fault": _memory_fault}], "state_changed": True}
            )
        if len(payload) > max_bytes:
            fault = {"kind": "too_big", "message": f"the result has {len(payload):,} bytes; the limit is {max_bytes:,}"}
            faults = [{"fault": fault}] * len(answers)
            payload = _encode({"id": request["id"], "at": position, "answers": faults, "state_changed": state_changed})
        if _getpid() != self._pid:
            _exit(0)
        _write(self._channel, _framed(payload))
        return not state_changed
