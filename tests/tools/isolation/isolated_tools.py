"""Tools that can only be stopped by killing them, and well-behaved ones; loaded by worker processes."""

from __future__ import annotations

import asyncio
import ctypes
import enum
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from toolwise.tools.base import BaseTool
from toolwise.tools.function import tool

CALLS = 0


class Unit(enum.Enum):
    CELSIUS = "c"


def note(pids: str, *more: int) -> None:
    Path(pids).write_text(" ".join(map(str, (os.getpid(), *more))))


@tool
def weather(city: str, days: int = 1, unit: Unit = Unit.CELSIUS) -> tuple[str, float, dict[str, Any]]:
    """The weather of a city."""
    return f"{city} {days} {unit.name}", 0.5, {"seen": [days]}


def plain(x: int) -> int:
    return 2 * x


@tool
def where() -> int:
    return os.getpid()


@tool
def count() -> int:
    global CALLS
    CALLS += 1
    return CALLS


@tool
def nap(seconds: float) -> str:
    time.sleep(seconds)
    return "rested"


@tool(isolate=True)
async def async_nap(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return f"rested in {'a worker' if os.environ.get('TOOLWISE_WORKER') else 'the trainer'}"


@tool(isolate=False)
def here() -> int:
    return os.getpid()


@tool
def hang_in_python(pids: str) -> str:
    note(pids)
    while True:
        pass


@tool
def hang_in_sleep(pids: str) -> str:
    note(pids)
    time.sleep(1e6)
    return ""


@tool
def hang_in_c(pids: str) -> str:
    note(pids)
    ctypes.PyDLL(None).sleep(1_000_000)  # with the interpreter's lock held
    return ""


@tool
def hang_in_regex(pids: str) -> str:
    note(pids)
    return str(re.match(r"(a+)+$", "a" * 64 + "b"))


@tool
def hang_deaf(pids: str) -> str:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    note(pids)
    while True:
        try:
            time.sleep(1e6)
        except BaseException:
            continue


@tool
def hang_with_children(pids: str) -> str:
    child = subprocess.Popen(["sleep", "1000"])
    away = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    forked = os.fork()
    if forked == 0:
        time.sleep(1000)
    note(pids, child.pid, away.pid, forked)
    time.sleep(1000)
    return ""


@tool
def die(how: str) -> str:
    if how == "exit":
        os._exit(3)
    if how == "segfault":
        ctypes.string_at(0)
    if how == "fork and exit":
        if os.fork() == 0:
            time.sleep(1000)  # holds the channel open
        os._exit(4)
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


@tool
def fail(how: str) -> Any:
    if how == "key":
        raise KeyError("mine")
    if how == "exit":
        sys.exit(7)
    if how == "json":
        return object()
    if how == "text":

        class MuteError(Exception):
            def __str__(self) -> str:
                raise ValueError

        raise MuteError
    return "x" * (9 << 20)


@tool
def talk(lines: int) -> str:
    for number in range(lines):
        print("line", number, "of the tool")
    print("and no more", end="")
    os.write(2, b" to stderr\n")
    return "said"


@tool
def leave_a_thread() -> str:
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    return "left"


class Ledger(BaseTool):
    """Keeps state between the calls of one rollout, and blocks."""

    isolate = True

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        super().__init__(config, tool_schema)
        self.entries: list[str] = []

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        self.entries.append(str(kwargs.get("first", "nothing")))
        return "one"

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[str, float | None, dict[str, Any]]:
        assert instance_id == "one"
        time.sleep(float(parameters.get("seconds", 0)))  # noqa: ASYNC251 (it blocks its own process, and nobody else)
        if parameters.get("die"):
            os._exit(5)
        self.entries.append(parameters["entry"])
        return f"{self.config['title']}: {', '.join(self.entries)}", 1.0, {"pid": os.getpid()}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        return float(len(self.entries)) + kwargs.get("more", 0)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        Path(kwargs["mark"]).write_text("released")


class NeedsMore(Ledger):
    def __init__(self, config: dict[str, Any], tool_schema: Any, connection: object) -> None:
        super().__init__(config, tool_schema)
