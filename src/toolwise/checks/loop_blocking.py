"""Detects code that blocks the event loop: runs it on a loop in another thread and watches that thread from outside."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from toolwise.concurrency import deadlines

HEARTBEAT_S = 0.05
_IDLE = ("selectors.py", "threading.py")
_ASYNC_PACKAGES = ("asyncio", "concurrent")


def run_watched(
    work: Callable[[], Coroutine[Any, Any, None]],
    *,
    limit_s: float,
    min_block_s: float,
    blocked: Literal["warning", "wrong"],
) -> tuple[Literal["ok", "warning", "wrong"], str]:
    """Run `work` to its end, or abandon it once it has blocked its loop for `limit_s`; return a verdict.

    Pauses shorter than `min_block_s` are blamed on the machine and ignored; longer ones have the verdict `blocked`.
    Exceptions from `work` propagate.
    """
    watch = _WatchedLoop(work)
    longest, where = 0.0, ""
    while watch.thread.is_alive():
        watch.thread.join(HEARTBEAT_S)
        blocked_s = time.monotonic() - watch.last_beat
        blocking_site = watch.blocking_site() if blocked_s > min_block_s else None
        if blocking_site is None:
            continue
        if blocked_s > max(limit_s, min_block_s):
            said = f"{blocking_site} blocked the event loop, and so all rollouts, for over {limit_s:g} s"
            return "wrong", f"{said}; await, or use a thread"
        longest, where = max((longest, where), (blocked_s, blocking_site))
    if watch.fault is not None:
        raise watch.fault
    if longest:
        said = f"{where} blocked the event loop, and so all other rollouts, for {longest:.1f} s"
        return blocked, f"{said}; await, or use a thread"
    return "ok", "never blocked"


class _WatchedLoop:
    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.last_beat = time.monotonic()
        self.fault: BaseException | None = None
        self._work = work
        self.thread = threading.Thread(target=self._run, name="toolwise-watched", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            deadlines.run(self._run_with_heartbeat())
        except BaseException as fault:
            self.fault = fault

    async def _run_with_heartbeat(self) -> None:
        beating = asyncio.create_task(self._beat())
        try:
            await self._work()
        finally:
            beating.cancel()

    async def _beat(self) -> None:
        while True:
            self.last_beat = time.monotonic()
            await asyncio.sleep(HEARTBEAT_S)

    def blocking_site(self) -> str | None:
        """Code location of the loop's thread; None if it is idle."""
        frame = sys._current_frames().get(self.thread.ident or 0)
        if frame is None or Path(frame.f_code.co_filename).name in _IDLE:
            return None
        while frame is not None and _is_async_frame(frame):
            frame = frame.f_back
        return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_qualname})" if frame else None


def _is_async_frame(frame: FrameType) -> bool:
    parts = Path(frame.f_code.co_filename).parts
    return any(part in _ASYNC_PACKAGES for part in parts[-3:])
