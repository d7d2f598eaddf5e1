"""Tools with real faults; loaded by worker processes."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

from toolwise.tools.function import tool


@tool
def sleep_in_c(note: str) -> str:
    """Holds on to the interpreter: no exception, and no thread of its own process, could ever stop it."""
    Path(note).write_text(str(os.getpid()))
    ctypes.PyDLL(None).sleep(1_000_000)
    return ""


@tool
def nap(seconds: float) -> str:
    """Blocks for a while, as honest tools do."""
    time.sleep(seconds)
    return "rested"


@tool
def drop_dead() -> str:
    """Takes its worker process with it."""
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


@tool
def wait_to_be_killed(note: str) -> str:
    """Says who it is, so that somebody else can kill it."""
    Path(note).write_text(str(os.getpid()))
    time.sleep(1_000_000)
    return ""
