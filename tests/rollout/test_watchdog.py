"""The watchdog reports the code that blocks the event loop, and nothing else."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from toolwise.envs.tool_env import ToolEnv
from toolwise.messages import Message, ToolCall
from toolwise.rollout.watchdog import Watchdog, find_blocking_frame, frames_inside_loop
from toolwise.tools.function import tool
from toolwise.tools.schema import validate_arguments
from toolwise.types import Task


@tool
async def rude(seconds: float) -> str:
    """Says that it is async, and blocks."""
    time.sleep(seconds)  # noqa: ASYNC251
    return "done"


@tool
async def backtrack(letters: int) -> str:
    """Blocks in C, and does not let go of the interpreter."""
    return str(re.match(r"(a+)+$", "a" * letters + "b"))


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.strip().startswith(text))


RUDE = f"{__file__}:{line_of('time.sleep(seconds)')} (rude)"


def watch(work: Coroutine[Any, Any, Any], threshold_s: float = 0.4) -> Watchdog:
    async def watched() -> Watchdog:
        with Watchdog(threshold_s) as watchdog:
            await asyncio.sleep(0.05)
            await asyncio.create_task(work)
            await asyncio.sleep(0.5)
        return watchdog

    return asyncio.run(watched())


async def in_an_episode(call: ToolCall) -> None:
    task = Task(task_id="t", prompt=[Message(role="user", content="?")])
    env = ToolEnv(task, {"rude": rude, "backtrack": backtrack}, tool_timeout_s=60)
    await env.reset()
    await env.step({"tool_calls": [call]})
    await env.close()


def test_a_blocking_async_tool_is_named_by_its_line(caplog: pytest.LogCaptureFixture) -> None:
    validate_arguments(rude.tool_schema, {"seconds": 0})  # its imports take time too
    with caplog.at_level(logging.WARNING, logger="toolwise.rollout"):
        watchdog = watch(in_an_episode(ToolCall(name="rude", arguments={"seconds": 1.2})))
    assert watchdog.names[RUDE] == 1
    assert watchdog.blocks >= 1
    assert 0.8 < watchdog.blocked_s < 20
    assert caplog.text.count(f"has been blocked for more than 0.4 s by {RUDE}: make it async") == 1
    assert caplog.text.count(f" s by {RUDE}\n") == 1


@pytest.mark.long
def test_code_in_c_that_holds_the_interpreter_is_named_too() -> None:
    letters, took = 16, 0.0
    while took < 0.5:  # long enough on this machine; one more letter doubles it
        letters, began = letters + 1, time.monotonic()
        re.match(r"(a+)+$", "a" * letters + "b")
        took = time.monotonic() - began
    watchdog = watch(in_an_episode(ToolCall(name="backtrack", arguments={"letters": letters + 1})))
    assert watchdog.names[f"{__file__}:{line_of('return str(re.match')} (backtrack)"] == 1


def test_two_blocks_are_counted_apart() -> None:
    async def twice() -> None:
        for _ in range(2):
            await rude.execute("i", {"seconds": 0.9})
            await asyncio.sleep(0.5)

    assert watch(twice()).names[RUDE] == 2


def test_a_loop_that_answers_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def busy() -> None:
        for _ in range(200):
            await asyncio.sleep(0.001)

    watchdog = watch(busy(), threshold_s=10.0)
    assert (watchdog.blocks, watchdog.blocked_s) == (0, 0.0)
    assert caplog.text == ""


def test_it_ends_with_the_block_and_holds_nothing_up() -> None:
    async def short() -> float:
        began = time.monotonic()
        for _ in range(20):
            with Watchdog():
                await asyncio.sleep(0)
        return time.monotonic() - began

    assert asyncio.run(short()) < 5
    assert not [thread for thread in threading.enumerate() if thread.name == "toolwise-watchdog"]


def frames(*places: tuple[str, str]) -> list[traceback.FrameSummary]:
    return [traceback.FrameSummary(file, 1, name, lookup_line=False) for file, name in places]


def test_the_program_that_started_the_loop_is_not_to_blame() -> None:
    library = sysconfig.get_paths()["stdlib"]
    packages = sysconfig.get_paths()["purelib"]
    ours = str(Path(sys.modules["toolwise"].__file__ or "").parent / "envs" / "tool_env.py")
    started = frames(("/home/me/train.py", "<module>"), (f"{library}/asyncio/events.py", "_run"))
    inside = frames((ours, "_call"), (f"{packages}/slow/client.py", "get"), (f"{library}/socket.py", "recv"))
    stack = frames_inside_loop([*started, *inside])
    assert stack == inside
    assert find_blocking_frame(stack).filename == f"{packages}/slow/client.py"
    assert find_blocking_frame([*inside, *frames(("/home/me/tools.py", "look"))]).filename == "/home/me/tools.py"
    assert find_blocking_frame(inside[:1]).filename == ours
    assert frames_inside_loop(inside) == inside
