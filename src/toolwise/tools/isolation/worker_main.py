"""What runs in a tool's worker process: loads one module, then answers one question after the other.

Started by `workers.py`. Ends with whoever started it: the kernel kills its whole group when the trainer is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import inspect
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any, NoReturn

from toolwise.sandbox import frames
from toolwise.tools.base import BaseTool, OpenAIFunctionToolSchema
from toolwise.tools.function import FunctionTool
from toolwise.tools.isolation.code_location import ModuleRef, ObjectRef
from toolwise.tools.isolation.forks import can_be_forked, fork_workers, open_descriptors
from toolwise.tools.isolation.random_generators import track_unseeded

# Kept here, so that what a tool patches does not reach them.
_getpid, _exit = os.getpid, os._exit
LIFECYCLE_METHODS = ("create", "execute", "calc_reward", "release")


def main(start: dict[str, Any]) -> NoReturn:
    """`start`: the channel, the pipe whose other end the trainer holds, the place to load, the largest answer."""
    os.set_inheritable(start["channel"], False)
    os.set_inheritable(start["life"], False)
    _die_with_parent(start["life"])
    sys.argv = [""]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    try:
        _serve(start["channel"], ModuleRef(**start["place"]), start["largest"])
    except BaseException:  # the channel is gone or this process is beyond repair: the trainer sees it end
        traceback.print_exc()
        _exit(1)
    _exit(0)


def _die_with_parent(lifeline: int) -> None:
    """All of this session's group ends with the trainer, even while a loop in C holds the interpreter.

    A pipe that nobody writes to signals its reader once: when the last writer is gone. The signal goes to the group,
    unlike that of PR_SET_PDEATHSIG, and so reaches what a tool has started too.
    """
    if sys.platform == "linux":
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
        os.set_blocking(lifeline, False)
        with contextlib.suppress(BlockingIOError):
            os.read(lifeline, 1)  # gone before it could be told
            _exit(0)
    else:
        threading.Thread(target=_wait_for_end, args=(lifeline,), daemon=True).start()


def _wait_for_end(lifeline: int) -> None:
    os.read(lifeline, 1)
    os.killpg(0, signal.SIGKILL)


def _serve(channel: int, module_ref: ModuleRef, max_bytes: int) -> None:
    send, open_before = _sender(channel, max_bytes), open_descriptors()
    try:
        with track_unseeded():
            module = module_ref.load()
    except BaseException as fault:  # other people's code: anything may come
        traceback.print_exc()
        send({"failed": f"{type(fault).__name__}: {_text(fault)}"[:2000]})
        return
    send({"loaded": True, "forks": can_be_forked(open_before), "pid": _getpid()})
    _serve_requests(channel, module, max_bytes)


def _sender(channel: int, max_bytes: int) -> Callable[[dict[str, Any]], None]:
    me = _getpid()

    def send(message: dict[str, Any]) -> None:
        payload = frames.encode(message)
        if len(payload) > max_bytes:
            raise ValueError(f"the result has {len(payload):,} bytes; the limit is {max_bytes:,}")
        if _getpid() != me:  # a child of the tool's, back from a fork where it has no business
            _exit(0)
        frames.write_all(channel, frames.to_frame(payload))

    return send


def _serve_requests(channel: int, module: ModuleType, max_bytes: int) -> None:
    """One question after the other, until nobody asks any more; or, where it is told to, as a zygote."""
    send, server = _sender(channel, max_bytes), _Server(module)
    while True:
        head = frames.read_exactly(channel, frames.HEADER.size)
        if len(head) < frames.HEADER.size:
            return
        question = json.loads(frames.read_exactly(channel, frames.HEADER.unpack(head)[0]))
        if "fork_workers" in question:
            server.close()
            channel, lifeline, output = fork_workers(channel)
            # What follows runs in a child: the zygote itself never comes back from there.
            _become_worker(lifeline, output)
            send, server = _sender(channel, max_bytes), _Server(module)
            send({"loaded": True, "forks": False, "pid": _getpid()})
            continue
        try:
            send({"id": question["id"], "value": server.answer(question)})
        except BaseException as fault:
            send({"id": question["id"], "fault": _fault_to_json(fault)})


def _become_worker(lifeline: int, output: int) -> None:
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    _die_with_parent(lifeline)


class _Server:
    """Answers out of one module: calls of its functions, or the life of one tool object made of a class in it."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._functions: dict[str, FunctionTool[..., Any]] = {}
        self._tool: BaseTool | None = None
        self._runner = asyncio.Runner()

    def close(self) -> None:
        self._runner.close()

    def answer(self, question: dict[str, Any]) -> Any:
        if "call" in question:
            return self._call(question["call"], question["parameters"], question.get("kwargs") or {})
        if "make" in question:
            self._tool = make_tool(self._find(question["make"]), question["config"], question["schema"])
            return True
        method = question["verb"]
        assert method in LIFECYCLE_METHODS
        return self._wait(getattr(self._tool, method)(*question["args"], **question["kwargs"]))

    def _call(self, name: str, parameters: dict[str, Any], kwargs: dict[str, Any]) -> Any:
        function = self._functions.get(name)
        if function is None:
            found = self._find(name)
            function = found if isinstance(found, FunctionTool) else FunctionTool(found, isolate=False)
            self._functions[name] = function
        return function.call_sync(parameters, self._wait, kwargs)

    def _find(self, name: str) -> Any:
        return ObjectRef(ModuleRef(None, ""), name).find(self._module)

    def _wait(self, awaitable: Awaitable[Any]) -> Any:
        async def result() -> Any:
            return await awaitable

        return self._runner.run(result())


def make_tool(kind: Callable[..., BaseTool], config: dict[str, Any], schema: dict[str, Any]) -> BaseTool:
    """An object of a tool class, made as the trainer made its own: of a configuration and maybe a schema."""
    if "tool_schema" in inspect.signature(kind).parameters:
        return kind(config, OpenAIFunctionToolSchema.model_validate(schema))
    return kind(config)


def _fault_to_json(fault: BaseException) -> dict[str, str]:
    lines = traceback.format_exception(fault)
    return {"type": type(fault).__name__, "message": _text(fault)[:20_000], "traceback": "".join(lines)[-20_000:]}


def _text(fault: BaseException) -> str:
    try:
        return str(fault)
    except Exception as worse:
        return f"its text cannot be had: {type(worse).__name__}"
