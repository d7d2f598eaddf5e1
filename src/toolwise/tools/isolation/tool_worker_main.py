"""The main function of a tool's worker process: loads one module, then serves requests one at a time.

`tool_process.py` starts it. The kernel kills its whole process group when the trainer dies.
"""

from __future__ import annotations

import asyncio
import contextlib
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

from toolwise.sandbox import wire
from toolwise.sandbox.layers.kernel import kill_when_closed
from toolwise.tools.base import BaseTool, OpenAIFunctionToolSchema
from toolwise.tools.function import FunctionTool
from toolwise.tools.isolation.code_location import ModuleRef, ObjectRef
from toolwise.tools.isolation.forks import can_be_forked, fork_workers, open_descriptors, track_unseeded
from toolwise.untrusted.user_code import describe, safe_text

# Bound here, so that a tool that patches `os` does not affect them.
_getpid, _exit = os.getpid, os._exit
LIFECYCLE_METHODS = ("create", "execute", "calc_reward", "release")


def main(start: dict[str, Any]) -> NoReturn:
    """`start`: the channel, the lifeline (a pipe from the trainer), the module to load, the maximum result size."""
    os.set_inheritable(start["channel"], False)
    os.set_inheritable(start["life"], False)
    _die_with_parent(start["life"])
    sys.argv = [""]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    try:
        _serve(start["channel"], ModuleRef(**start["place"]), start["largest"])
    except BaseException:  # the channel is closed or this process is broken: the trainer sees it exit
        traceback.print_exc()
        _exit(1)


def _die_with_parent(lifeline: int) -> None:
    """Kill the whole process group when the trainer dies, even while C code holds the interpreter.

    Unlike PR_SET_PDEATHSIG the signal goes to the process group, and so reaches processes that a tool has started.
    """
    if sys.platform == "linux":
        kill_when_closed(lifeline, -os.getpid())
        os.set_blocking(lifeline, False)
        with contextlib.suppress(BlockingIOError):
            os.read(lifeline, 1)  # the trainer died before the signal was set up
            _exit(0)
    else:
        threading.Thread(target=_wait_for_end, args=(lifeline,), daemon=True).start()


def _wait_for_end(lifeline: int) -> None:
    os.read(lifeline, 1)
    os.killpg(0, signal.SIGKILL)


def _serve(descriptor: int, module_ref: ModuleRef, max_bytes: int) -> NoReturn:
    """Serve requests until the channel closes; on request become a zygote."""
    channel, open_before = _Channel(descriptor, max_bytes), open_descriptors()
    try:
        with track_unseeded():
            module = module_ref.load()
    except BaseException as fault:  # user code may raise anything
        traceback.print_exc()
        channel.send_json({"failed": describe(fault)})
        _exit(0)
    channel.send_json({"loaded": True, "forks": can_be_forked(open_before), "pid": _getpid()})
    server = _Server(module)
    while True:
        request = json.loads(channel.receive())
        if "fork_workers" in request:
            server.close()
            descriptor, lifeline, output = fork_workers(descriptor)
            # From here on this is a forked child: the zygote itself never returns.
            for stream in (1, 2):
                os.dup2(output, stream)
            os.close(output)
            _die_with_parent(lifeline)
            channel, server = _Channel(descriptor, max_bytes), _Server(module)
            channel.send_json({"loaded": True, "forks": False, "pid": _getpid()})
            continue
        try:
            channel.send_json({"id": request["id"], "value": server.answer(request)})
        except BaseException as fault:
            channel.send_json({"id": request["id"], "fault": _fault_to_json(fault)})


class _Channel(wire.WorkerChannel):
    def __init__(self, descriptor: int, max_bytes: int) -> None:
        super().__init__(descriptor)
        self._max_bytes = max_bytes

    def send_json(self, message: dict[str, Any]) -> None:
        payload = wire.encode(message)
        if len(payload) > self._max_bytes:
            raise ValueError(f"the result has {len(payload):,} bytes; the limit is {self._max_bytes:,}")
        self.send(payload)


class _Server:
    """Answers requests for one module: calls of its functions, or the life cycle of one tool object."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._functions: dict[str, FunctionTool[..., Any]] = {}
        self._tool: BaseTool | None = None
        self._runner = asyncio.Runner()

    def close(self) -> None:
        self._runner.close()

    def answer(self, request: dict[str, Any]) -> Any:
        if "call" in request:
            return self._call(request["call"], request["parameters"], request.get("kwargs") or {})
        if "make" in request:
            self._tool = make_tool(self._find(request["make"]), request["config"], request["schema"])
            return True
        method = request["verb"]
        assert method in LIFECYCLE_METHODS
        return self._wait(getattr(self._tool, method)(*request["args"], **request["kwargs"]))

    def _call(self, name: str, parameters: dict[str, Any], kwargs: dict[str, Any]) -> Any:
        function = self._functions.get(name)
        if function is None:
            obj = self._find(name)
            function = obj if isinstance(obj, FunctionTool) else FunctionTool(obj, isolate=False)
            self._functions[name] = function
        return function.call_sync(parameters, self._wait, kwargs)

    def _find(self, name: str) -> Any:
        return ObjectRef(ModuleRef(None, ""), name).find(self._module)

    def _wait(self, awaitable: Awaitable[Any]) -> Any:
        async def result() -> Any:
            return await awaitable

        return self._runner.run(result())


def make_tool(kind: Callable[..., BaseTool], config: dict[str, Any], schema: dict[str, Any]) -> BaseTool:
    """Create a tool object like the trainer's, from the configuration and, if the class takes it, the schema."""
    if "tool_schema" in inspect.signature(kind).parameters:
        return kind(config, OpenAIFunctionToolSchema.model_validate(schema))
    return kind(config)


def _fault_to_json(fault: BaseException) -> dict[str, str]:
    lines = traceback.format_exception(fault)
    return {"type": type(fault).__name__, "message": safe_text(fault)[:20_000], "traceback": "".join(lines)[-20_000:]}
