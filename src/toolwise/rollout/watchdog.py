"""Watches the event loop from a second thread and reports code that blocks it, because that stalls every rollout."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import re
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import IO

import toolwise

log = logging.getLogger("toolwise.rollout")

Stack = list[traceback.FrameSummary]

_PACKAGE_DIR = str(Path(str(toolwise.__file__)).resolve().parent)
_STDLIB_DIRS = tuple({sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib")})
_SITE_PACKAGES = tuple({sysconfig.get_paths()[key] for key in ("purelib", "platlib")})
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_MAX_STACK_FRAMES = 12
_ADVICE = "make it async, or run it in a worker process (isolate=True)"


class Watchdog:
    """`with Watchdog() as watchdog:` inside a coroutine watches its event loop until the block ends.

    The loop counts as blocked when it does not respond for `threshold_s`. The stack of its thread is then logged once,
    with the line of user code it is in, and the total blocked time is added up when the loop responds again. C code
    that holds the GIL stops the watchdog thread too; to catch that, the watchdog uses `faulthandler`'s single timer
    while it runs.
    """

    def __init__(self, threshold_s: float = 5.0) -> None:
        self.threshold_s = threshold_s
        self.blocks = 0
        self.blocked_s = 0.0
        self.names: Counter[str] = Counter()
        """file:line (function) -> number of times it blocked the loop."""
        self._stop = threading.Event()
        self._answered = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watchdog:
        loop, thread_id = asyncio.get_running_loop(), threading.get_ident()
        self._stop.clear()
        self._thread = threading.Thread(
            target=self._watch, args=(loop, thread_id), name="toolwise-watchdog", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stop.set()
        self._answered.set()  # the loop runs this code, so it will not answer an open probe
        if self._thread is not None:
            self._thread.join(1.0)

    def _watch(self, loop: asyncio.AbstractEventLoop, thread_id: int) -> None:
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as dump:
            try:
                while self._probe_loop(loop, thread_id, dump):
                    pass
            finally:
                faulthandler.cancel_dump_traceback_later()

    def _probe_loop(self, loop: asyncio.AbstractEventLoop, thread_id: int, dump: IO[str]) -> bool:
        """Probe the loop once; False if there is nothing left to watch."""
        faulthandler.dump_traceback_later(self.threshold_s, file=dump)
        started = time.monotonic()
        if self._stop.wait(self.threshold_s / 5):
            return False
        answered = self._answered = threading.Event()
        if self._stop.is_set():  # `__exit__` ran just now and set the previous event
            return False
        try:
            loop.call_soon_threadsafe(answered.set)
        except RuntimeError:  # the loop is closed
            return False
        responded = answered.wait(self.threshold_s)
        elapsed_s = time.monotonic() - started
        if elapsed_s > 1.5 * self.threshold_s or (responded and elapsed_s > 1.1 * self.threshold_s):
            # This thread stood still as well: all we have is what the timer dumped meanwhile.
            faulthandler.cancel_dump_traceback_later()
            self._record_block(self._describe_blocker(_parse_faulthandler_dump(dump, thread_id)), elapsed_s)
        elif not responded:
            frame = sys._current_frames().get(thread_id)
            name = self._describe_blocker(list(traceback.extract_stack(frame)) if frame is not None else [])
            while not answered.wait(1.0) and not self._stop.is_set():
                pass
            self._record_block(name, time.monotonic() - started)
        dump.seek(0)
        dump.truncate()
        return True

    def _record_block(self, name: str, blocked_s: float) -> None:
        self.blocks += 1
        self.blocked_s += blocked_s
        self.names[name] += 1
        log.warning("the event loop, and with it every rollout, was blocked for %.1f s by %s", blocked_s, name)

    def _describe_blocker(self, stack: Stack) -> str:
        """Log and return the blocking line. Logged at once, because the block may never end."""
        stack = frames_inside_loop(stack)
        if not stack or stack[-1].filename.endswith("selectors.py"):
            return "no code in the loop: the whole process was suspended"
        frame = find_blocking_frame(stack)
        name = f"{frame.filename}:{frame.lineno} ({frame.name})"
        lines = "".join(traceback.format_list(stack[-_MAX_STACK_FRAMES:])).rstrip()
        log.warning(
            "the event loop has been blocked for more than %g s by %s: %s\n%s", self.threshold_s, name, _ADVICE, lines
        )
        return name


def _parse_faulthandler_dump(dump: IO[str], thread_id: int) -> Stack:
    """The stack of one thread from a `faulthandler` dump, outermost frame first as in `traceback`."""
    dump.seek(0)
    stack: Stack = []
    inside = False
    for line in dump.read().splitlines():
        if "hread 0x" in line:
            inside = line.partition("0x")[2].startswith(f"{thread_id:016x}")
        elif inside and (match := _FRAME.match(line)):
            stack.insert(0, traceback.FrameSummary(match[1], int(match[2]), match[3]))
    return stack


def frames_inside_loop(stack: Stack) -> Stack:
    """The frames below the event loop: the program that started the loop is on the same stack, but not to blame."""
    for index in range(len(stack) - 1, -1, -1):
        if stack[index].name in ("_run", "_run_once") and stack[index].filename.startswith(_STDLIB_DIRS):
            return stack[index + 1 :] or stack
    return stack


def find_blocking_frame(stack: Stack) -> traceback.FrameSummary:
    """The innermost frame of user code; failing that of a package, of toolwise, or of anything."""
    not_toolwise = [f for f in stack if not f.filename.startswith((_PACKAGE_DIR, "<frozen"))]
    outside = [
        f for f in not_toolwise if f.filename.startswith(_SITE_PACKAGES) or not f.filename.startswith(_STDLIB_DIRS)
    ]
    user_code = [f for f in outside if not f.filename.startswith(_SITE_PACKAGES)]
    toolwise_code = [f for f in stack if f.filename.startswith(_PACKAGE_DIR)]
    return (user_code or outside or toolwise_code or stack)[-1]
