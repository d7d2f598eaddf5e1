"""Watches the event loop from beside it, and names whoever blocks it: one blocking tool stops every rollout."""

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
    """`with Watchdog() as watchdog:` inside a coroutine watches its loop until the block ends.

    A loop that does not answer for `threshold_s` is blocked: the stack of its thread is logged once, with the line of
    the user's code that it is in, and the whole time is counted when the loop is back. C code that holds on to the
    interpreter stops this thread too; for that, and while it watches, it uses `faulthandler`'s one timer.
    """

    def __init__(self, threshold_s: float = 5.0) -> None:
        self.threshold_s = threshold_s
        self.blocks = 0
        self.blocked_s = 0.0
        self.names: Counter[str] = Counter()
        """file:line (function) -> how often it was found blocking."""
        self._stop = threading.Event()
        self._answered = threading.Event()
        self._thread: threading.Thread | None = None

    def metrics(self) -> dict[str, float]:
        return {"watchdog/blocks": float(self.blocks), "watchdog/blocked_s": self.blocked_s}

    def __enter__(self) -> Watchdog:
        loop, watched = asyncio.get_running_loop(), threading.get_ident()
        self._stop.clear()
        self._thread = threading.Thread(target=self._watch, args=(loop, watched), name="toolwise-watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stop.set()
        self._answered.set()  # the loop is here, and answers no question that is still open
        if self._thread is not None:
            self._thread.join(1.0)

    def _watch(self, loop: asyncio.AbstractEventLoop, watched: int) -> None:
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as notes:
            try:
                while self._probe_loop(loop, watched, notes):
                    pass
            finally:
                faulthandler.cancel_dump_traceback_later()

    def _probe_loop(self, loop: asyncio.AbstractEventLoop, watched: int, notes: IO[str]) -> bool:
        """One question to the loop; False where there will be no further one."""
        faulthandler.dump_traceback_later(self.threshold_s, file=notes)
        began = time.monotonic()
        if self._stop.wait(self.threshold_s / 5):
            return False
        answered = self._answered = threading.Event()
        if self._stop.is_set():  # it ended just now, and set the question before
            return False
        try:
            loop.call_soon_threadsafe(answered.set)
        except RuntimeError:  # the loop is closed
            return False
        came = answered.wait(self.threshold_s)
        passed_s = time.monotonic() - began
        if passed_s > 1.5 * self.threshold_s or (came and passed_s > 1.1 * self.threshold_s):
            # This thread stood still as well: what the timer saw meanwhile is all there is.
            faulthandler.cancel_dump_traceback_later()
            self._record_block(self._describe_blocker(_parse_faulthandler_dump(notes, watched)), passed_s)
        elif not came:
            frame = sys._current_frames().get(watched)
            name = self._describe_blocker(list(traceback.extract_stack(frame)) if frame is not None else [])
            while not answered.wait(1.0) and not self._stop.is_set():
                pass
            self._record_block(name, time.monotonic() - began)
        notes.seek(0)
        notes.truncate()
        return True

    def _record_block(self, name: str, blocked_s: float) -> None:
        self.blocks += 1
        self.blocked_s += blocked_s
        self.names[name] += 1
        log.warning("the event loop was blocked for %.1f s, and every rollout with it, by %s", blocked_s, name)

    def _describe_blocker(self, stack: Stack) -> str:
        """Who blocks; said at once, since it may never end."""
        stack = frames_inside_loop(stack)
        if not stack or stack[-1].filename.endswith("selectors.py"):
            return "nobody: the whole process stood still"
        guilty = find_blocking_frame(stack)
        name = f"{guilty.filename}:{guilty.lineno} ({guilty.name})"
        lines = "".join(traceback.format_list(stack[-_MAX_STACK_FRAMES:])).rstrip()
        log.warning("the event loop is blocked for over %g s by %s: %s\n%s", self.threshold_s, name, _ADVICE, lines)
        return name


def _parse_faulthandler_dump(notes: IO[str], thread: int) -> Stack:
    """The stack of a thread out of what `faulthandler` wrote, outermost first as `traceback` has it."""
    notes.seek(0)
    stack: Stack = []
    inside = False
    for line in notes.read().splitlines():
        if "hread 0x" in line:
            inside = line.partition("0x")[2].startswith(f"{thread:016x}")
        elif inside and (found := _FRAME.match(line)):
            stack.insert(0, traceback.FrameSummary(found[1], int(found[2]), found[3]))
    return stack


def frames_inside_loop(stack: Stack) -> Stack:
    """What the loop has called: the program that started the loop stands on the same stack, and is not to blame."""
    for at in range(len(stack) - 1, -1, -1):
        if stack[at].name in ("_run", "_run_once") and stack[at].filename.startswith(_STDLIB_DIRS):
            return stack[at + 1 :] or stack
    return stack


def find_blocking_frame(stack: Stack) -> traceback.FrameSummary:
    """The innermost line of the user's own; else of a package, else of ours, else of all."""
    theirs = [f for f in stack if not f.filename.startswith((_PACKAGE_DIR, "<frozen"))]
    outside = [f for f in theirs if f.filename.startswith(_SITE_PACKAGES) or not f.filename.startswith(_STDLIB_DIRS)]
    own = [f for f in outside if not f.filename.startswith(_SITE_PACKAGES)]
    ours = [f for f in stack if f.filename.startswith(_PACKAGE_DIR)]
    return (own or outside or ours or stack)[-1]
