"""What runs in a worker process: waits for a plan, hardens itself, loads one user's function, answers calls.

Started by `worker.py` as `python -I -S -c …` in a session, a folder and an environment of its own.
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
from toolwise.sandbox.layers.parent_death import die_with_trainer
from toolwise.sandbox.output import MarkedStream, current_call
from toolwise.sandbox.scratch import FOLDER_FLAGS, EmptyFolderCache, empty_folder
from toolwise.sandbox.worker_state import Snapshot

# Kept here, and compiled where there is a choice, so that whatever a function patches later does not reach them.
_getpid, _exit, _write = os.getpid, os._exit, frames.write_all
_stat, _listdir, _open, _close = os.stat, os.listdir, os.open, os.close
_encode, _framed, _read, _header = to_json, frames.to_frame, frames.read_exactly, frames.HEADER
_decode = json.JSONDecoder().raw_decode
CALL_EMPTY_S = 0.2
"""What a worker has to empty its folder after a call; one that cannot is replaced."""
_memory_fault = {"kind": "memory", "message": "it asked for more memory than memory_mb allows"}


def main(start: dict[str, Any]) -> NoReturn:
    """`start`: the channel, the descriptor whose other end the trainer holds, and the parent's process id."""
    die_with_trainer(start["life"], start["parent"])
    os.set_inheritable(start["life"], False)
    os.set_inheritable(start["channel"], False)
    sys.argv = [""]
    sys.path[:] = [place for place in sys.path if place in start["keep"]]
    buffer = sys.stdout.buffer  # one for both, so that what they print keeps its order
    sys.stdout, sys.stderr = MarkedStream(buffer), MarkedStream(buffer)
    worker = _Worker(start["channel"])
    try:
        worker.serve()
    except BaseException:  # the channel is gone or this process is beyond repair: the trainer sees it end
        _exit(1)
    _exit(0)


def _allowed(plan: Plan, got: HardeningResult) -> tuple[str, ...]:
    """What this worker does not refuse: a failure there is none of the sandbox's doing, and must not be told so."""
    files = () if "landlock" in got.layers else ("files",)
    calls = () if "seccomp" in got.layers else ("calls", "network", "subprocess")
    return (*plan.permissions, *files, *calls)


def _needs_fresh_worker(answer: JsonDict) -> bool:
    """Whether the calls behind this one need a fresh worker. One that raised, or returned nonsense, does not stop them:
    the worker is as it was, and ends after them."""
    return "fault" in answer and answer["fault"]["kind"] not in ("exception", "bad_type", "non_finite", "wrong_length")


class _Worker:
    def __init__(self, channel: int) -> None:
        self._channel, self._pid = channel, _getpid()
        self._snapshot: Snapshot | None = None
        self._scratch, self._empty_since = "", EmptyFolderCache()

    def _send(self, message: JsonDict) -> None:
        if _getpid() != self._pid:  # a child of the user's, back from a fork where it has no business
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
        self._scratch, here = plan.scratch, _framed(_encode({"folder": True}))
        got = harden(plan, lambda: send_folders(self._channel, plan.folders, here))
        self._send({"layers": got.layers, "missing": got.missing})
        if order.get("probe"):
            from toolwise.sandbox.layers.probes import probe_layers

            self._send({"probed": probe_layers(plan)})
            return
        harness = self._load(order, _allowed(plan, got))
        while harness is not None:
            self._answer(harness, self._receive())

    def _load(self, order: JsonDict, allowed: tuple[str, ...]) -> Harness | None:
        try:
            if order.get("top"):
                preload_package(order["top"])
            harness = Harness.load(order["reference"], allowed)
        except BaseException as fault:  # other people's code: anything may come
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
        """Each answer as it comes, with whether a call has changed what all of them share; then one without any, which
        says how the worker is after all of them."""
        from toolwise.sandbox.async_calls import run_overlapping

        assert self._snapshot is not None
        flush, patched, grave = self._snapshot.flush, self._snapshot.patched, False

        def on_answer(position: int, answer: JsonDict) -> None:
            nonlocal grave
            grave |= _needs_fresh_worker(answer)
            flush()
            self._send_answers(request, [answer], position, tainted=patched())

        calls = request["calls"]
        ended = run_overlapping(harness, calls, request["overlap_s"], on_answer)
        self._finish(request, [], len(calls), tainted=grave or not ended)

    def _finish(self, request: JsonDict, answers: list[JsonDict], position: int, *, tainted: bool = False) -> bool:
        """Sends what a call gave. False where the worker is no longer as it was: the rest goes to a fresh one."""
        assert self._snapshot is not None
        try:
            self._snapshot.tidy()
            tainted = tainted or self._snapshot.changed() or any(_needs_fresh_worker(answer) for answer in answers)
            tainted = tainted or not self._empty_folder()
        except MemoryError:
            gc.collect()
            tainted, answers = True, [{"fault": _memory_fault}]
        return self._send_answers(request, answers, position, tainted=tainted)

    def _empty_folder(self) -> bool:
        """What a call leaves there is none of the next one's business. False where something stays."""
        try:
            found = _stat(self._scratch)
            if self._empty_since.is_still_empty(found):
                return True
            if not _listdir(self._scratch):
                self._empty_since.record_empty(found)
                return True
            folder = _open(self._scratch, FOLDER_FLAGS)
            try:
                return empty_folder(folder, CALL_EMPTY_S)
            finally:
                _close(folder)
        except OSError:
            return False

    def _send_answers(self, request: JsonDict, answers: list[JsonDict], position: int, *, tainted: bool) -> bool:
        largest = request["largest"]
        try:
            payload = _encode({"id": request["id"], "at": position, "answers": answers, "tainted": tainted})
        except MemoryError:
            gc.collect()
            tainted = True
            payload = _encode(
                {"id": request["id"], "at": position, "answers": [{"fault": _memory_fault}], "tainted": True}
            )
        if len(payload) > largest:
            fault = {"kind": "too_big", "message": f"the result has {len(payload):,} bytes; the limit is {largest:,}"}
            many = [{"fault": fault}] * len(answers)
            payload = _encode({"id": request["id"], "at": position, "answers": many, "tainted": tainted})
        if _getpid() != self._pid:
            _exit(0)
        _write(self._channel, _framed(payload))
        return not tainted
