"""Entry point of a worker process: receives a plan, hardens itself, loads one user function and answers calls.

Started by `processes.py` as `python -I -S -B -c …` in its own session, folder and environment.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import gc
import json
import os
import signal
import sys
import threading
from contextlib import suppress
from types import ModuleType
from typing import Any, NoReturn

from pydantic_core import to_json

from toolwise.sandbox import wire
from toolwise.sandbox.harness import MEMORY_FAULT, Harness, JsonDict, plain_fault, preload_package
from toolwise.sandbox.layers.disk import send_folders
from toolwise.sandbox.layers.hardening import HardeningResult, Plan, harden
from toolwise.sandbox.layers.kernel import closing_fd, die_with_trainer
from toolwise.sandbox.output import MarkedStream, current_call
from toolwise.sandbox.scratch import FOLDER_FLAGS, EmptyFolderCache, empty_folder

# Saved here, as compiled functions where possible, so that later patches by user code do not affect them.
_exit, _open, _encode = os._exit, os.open, to_json
_decode = json.JSONDecoder().raw_decode
CALL_EMPTY_S = 0.2
"""Time for a worker to empty its folder after a call; a worker that fails is replaced."""
_WATCHED = """
    builtins json json.encoder json.decoder math re os posixpath sys time random string statistics collections
    itertools functools operator datetime decimal copy
    toolwise.messages toolwise.types.results toolwise.types toolwise.rewards.function toolwise.sandbox.harness
"""
WATCHED = tuple(_WATCHED.split())  # those that are loaded when the function is
_SIGNALS = [
    int(number) for number in signal.valid_signals() if number not in (signal.SIGKILL, signal.SIGSTOP) and number < 32
]
# The C functions: signal.getsignal wraps each result in an enum, which is too slow for every call.
_clear_timer, _handler, _threads = _signal.setitimer, _signal.getsignal, threading.active_count
_collect, _cwd, _limit, _trace, _profile = gc.collect, os.getcwd, sys.getrecursionlimit, sys.gettrace, sys.getprofile


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
        self._channel = wire.WorkerChannel(channel)
        self._send_bytes, self._receive_bytes = self._channel.send, self._channel.receive
        self._snapshot: Snapshot
        self._scratch, self._empty_since = "", EmptyFolderCache()

    def _send(self, message: JsonDict) -> None:
        self._send_bytes(_encode(message))

    def _receive(self) -> Any:
        return _decode(self._receive_bytes().decode("ascii"))[0]

    def serve(self) -> None:
        self._send({"ready": True, "pid": os.getpid()})
        order = self._receive()
        plan = Plan.from_json(order["plan"])
        sys.path += order["path"]
        self._scratch, message = plan.scratch, wire.to_frame(_encode({"folder": True}))
        result = harden(plan, lambda: send_folders(self._channel.descriptor, plan.folders, message))
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
        try:
            self._snapshot.tidy()
            state_changed = (
                state_changed
                or self._snapshot.changed()
                or any(_needs_fresh_worker(answer) for answer in answers)
                or not self._empty_folder()
            )
        except MemoryError:
            gc.collect()
            state_changed, answers = True, [{"fault": MEMORY_FAULT}]
        return self._send_answers(request, answers, position, state_changed=state_changed)

    def _empty_folder(self) -> bool:
        """Hide a call's files from the next call. False if something is left."""
        try:
            if self._empty_since.is_empty(self._scratch):
                return True
            with closing_fd(_open(self._scratch, FOLDER_FLAGS)) as folder:
                return empty_folder(folder, CALL_EMPTY_S)
        except OSError:
            return False

    def _send_answers(self, request: JsonDict, answers: list[JsonDict], position: int, *, state_changed: bool) -> bool:
        message = {"id": request["id"], "at": position, "answers": answers, "state_changed": state_changed}
        max_bytes = request["largest"]
        try:
            payload = _encode(message)
        except MemoryError:
            gc.collect()
            state_changed = True
            payload = _encode({**message, "answers": [{"fault": MEMORY_FAULT}], "state_changed": True})
        if len(payload) > max_bytes:
            fault = {"kind": "too_big", "message": f"the result has {len(payload):,} bytes; the limit is {max_bytes:,}"}
            payload = _encode({**message, "answers": [{"fault": fault}] * len(answers)})
        self._send_bytes(payload)
        return not state_changed


class Snapshot:
    """The state of the worker before the first call."""

    def __init__(self) -> None:
        namespaces = [vars(module) for name in WATCHED if isinstance(module := sys.modules.get(name), ModuleType)]
        own_modules = {name for name in WATCHED if name.startswith(("toolwise", "json", "random"))}
        classes = {
            value
            for namespace in namespaces
            for value in list(namespace.values())
            if isinstance(value, type) and value.__module__ in own_modules
        }
        self._spaces: list[Any] = [*namespaces, *(vars(cls) for cls in classes)]
        self._values = [list(namespace.values()) for namespace in self._spaces]
        self._process_state, self._handlers = self._observe(), _handlers()
        self._flush = [stream.flush for stream in (sys.stdout, sys.stderr)]
        gc.collect()
        gc.freeze()

    def _observe(self) -> tuple[Any, ...]:
        environment = os.environ._data if hasattr(os.environ, "_data") else dict(os.environ)
        streams = (sys.stdout, sys.stderr, sys.stdin)
        modules = (os.path, len(sys.meta_path), len(sys.path), len(sys.path_hooks))
        return (_cwd(), _limit(), _trace(), _profile(), dict(environment), streams, modules)

    def tidy(self) -> None:
        """Clean up what can be cleaned up: timers, and garbage whose finalizers belong to this call."""
        _clear_timer(_signal.ITIMER_REAL, 0)
        _clear_timer(_signal.ITIMER_VIRTUAL, 0)
        _clear_timer(_signal.ITIMER_PROF, 0)
        _collect()
        self.flush()

    def flush(self) -> None:
        for flush in self._flush:
            with suppress(Exception):
                flush()

    def changed(self) -> bool:
        return _threads() != 1 or self.patched() or _handlers() != self._handlers

    def patched(self) -> bool:
        """The part of `changed` that works while calls overlap: they may use threads, their loop a signal handler."""
        try:
            # Lists compare by identity first, item by item in C: fast enough for every call.
            return [
                list(space.values()) for space in self._spaces
            ] != self._values or self._observe() != self._process_state
        except Exception:  # a deleted working directory, an object that cannot be compared
            return True


def _handlers() -> list[Any]:
    return [_handler(number) for number in _SIGNALS]
