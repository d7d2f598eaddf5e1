"""Work on long texts leaves the event loop free; work on short ones is done at once."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar

from toolwise.concurrency.text_threads import LONG_CHARS, run_if_long

name: ContextVar[str] = ContextVar("name", default="")


def test_only_long_texts_go_to_a_thread() -> None:
    async def threads() -> list[threading.Thread]:
        return [await run_if_long(chars, threading.current_thread) for chars in (LONG_CHARS, LONG_CHARS + 1)]

    short, long = asyncio.run(threads())
    assert short is threading.current_thread()
    assert long is not threading.current_thread()


def test_the_loop_goes_on_meanwhile() -> None:
    async def work() -> str:
        released = threading.Event()
        asyncio.get_running_loop().call_soon(released.set)
        return "done" if await run_if_long(LONG_CHARS + 1, released.wait, 10) else "blocked"

    assert asyncio.run(work()) == "done"


def test_the_thread_sees_the_callers_context() -> None:
    async def work() -> str:
        name.set("mine")
        return await run_if_long(LONG_CHARS + 1, name.get)

    assert asyncio.run(work()) == "mine"
