"""The program that runs an outside agent: loads one function and calls it for one task at a time.

It runs in the agent's own environment, so it needs nothing but the standard library. Messages are JSON with a length of
four bytes before them, on a socket whose descriptor is the only argument: first the function, then one task after
another.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import struct
import sys
import threading
import traceback
from typing import Any

HEADER = struct.Struct("!I")
MAX_TEXT = 20_000
NOT_OWN = ("<", os.path.dirname(os.__file__))
"""How the names of files of the standard library begin."""


def main() -> None:
    channel = int(sys.argv[1])
    os.set_inheritable(channel, False)
    start = _receive(channel)
    sys.argv = [start["target"]]
    sys.path[:0] = [path for path in start["path"] if path not in sys.path]
    try:
        function = _load(start["target"])
    except BaseException as fault:  # the agent's file may raise anything
        traceback.print_exc()
        _send(channel, {"failed": _describe(fault)})
        os._exit(0)
    _send(channel, {"loaded": True})
    worker = os.getpid()
    while True:
        request = _receive(channel)
        try:
            result = _plain(_call(function, request))
            json.dumps(result)
            reply: dict[str, Any] = {"result": result}
        except BaseException as fault:
            traceback.print_exc()
            reply = {"fault": _describe(fault)}
        if os.getpid() != worker:  # a child of the agent's that returned too
            os._exit(0)
        _send(channel, {**reply, "id": request["id"], "threads": threading.active_count()})


def _call(function: Any, request: dict[str, Any]) -> Any:
    value = function(request["task"], request["base_url"], request["api_key"])
    if not inspect.isawaitable(value):
        return value

    async def wait() -> Any:
        return await value

    return asyncio.run(wait())  # which also cancels what the agent left running


def _load(target: str) -> Any:
    place, _, name = target.rpartition(":")
    if place.endswith(".py"):
        sys.path.insert(0, os.path.dirname(os.path.abspath(place)))
        spec = importlib.util.spec_from_file_location("toolwise_agent_file", place)
        if spec is None or spec.loader is None or not os.path.isfile(place):
            raise ImportError(f"there is no file {place}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    function: Any = module
    for part in name.split("."):
        if not hasattr(function, part):
            raise AttributeError(f"{place} has no {name}")
        function = getattr(function, part)
    if not callable(function):
        raise TypeError(f"{name} is not a function but {type(function).__name__}")
    _check_parameters(function, name)
    return function


def _check_parameters(function: Any, name: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function that is not written in Python
        return
    try:
        signature.bind({}, "", "")
    except TypeError as fault:
        raise TypeError(f"{name}{signature} must take (task, base_url, api_key): {fault}") from None


def _plain(value: Any) -> Any:
    """A pydantic model, such as an `EvaluateResult`, as a dictionary; a NumPy scalar as a number."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return value.item() if hasattr(value, "item") and not isinstance(value, dict) else value


def _describe(fault: BaseException) -> str:
    try:
        text = str(fault)
    except BaseException:
        text = "(its text could not be had)"
    return f"{type(fault).__name__}: {text}"[:MAX_TEXT] + _place_of(fault)


def _place_of(fault: BaseException) -> str:
    """The last line of the agent's own code in the traceback, not of a library."""
    files = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(fault.__traceback__)]
    own = [place for place in files if place[0] != __file__ and not place[0].startswith(NOT_OWN)]
    own = [place for place in own if "site-packages" not in place[0]]
    return f" ({os.path.basename(own[-1][0])}:{own[-1][1]})" if own else ""


def _send(channel: int, message: dict[str, Any]) -> None:
    payload = json.dumps(message).encode()
    data = memoryview(HEADER.pack(len(payload)) + payload)
    while data:
        data = data[os.write(channel, data) :]


def _receive(channel: int) -> Any:
    (length,) = HEADER.unpack(_read(channel, HEADER.size))
    return json.loads(_read(channel, length))


def _read(channel: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = os.read(channel, count - len(data))
        if not part:
            os._exit(0)  # the trainer is gone
        data += part
    return data


if __name__ == "__main__":
    main()
