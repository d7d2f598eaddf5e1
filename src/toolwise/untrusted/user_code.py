"""Turns everything that user code raises into an ordinary `Exception`, except the user's own Ctrl-C.

A tool, an environment, a policy or a reward may raise `KeyboardInterrupt`, `SystemExit`, `GeneratorExit` or another
`BaseException` (such as a panic in a Rust extension). None of them may end a run: asyncio lets the first two escape
from the event loop, and most code does not catch the others.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from toolwise.untrusted.bounds import truncate_text
from toolwise.untrusted.time_limit import TimeLimitError, TimeLimitExceeded, call_within

P = ParamSpec("P")
T = TypeVar("T")

_name_of: Callable[[type], str] = type.__dict__["__name__"].__get__  # cannot be overridden by a metaclass
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_TORCH = f"{os.sep}site-packages{os.sep}torch{os.sep}"
MAX_CHARS = 2000
"""Length limit of the description of an exception."""
_TORCH_STATE = {
    "is_grad_enabled": "set_grad_enabled",
    "get_default_dtype": "set_default_dtype",
    "get_default_device": "set_default_device",
    "get_num_threads": "set_num_threads",
    "get_deterministic_debug_mode": "set_deterministic_debug_mode",
}
"""What user code may change for the whole process: how to read it, and how to set it."""


class Interrupt(KeyboardInterrupt):
    """The user's Ctrl-C, raised by our signal handler."""


class UserCodeError(RuntimeError):
    """Replaces a `BaseException` that would otherwise have ended the program."""


def is_interrupt(fault: BaseException) -> bool:
    """Whether `fault` came from a signal and not from a `raise` in user code."""
    if not isinstance(fault, KeyboardInterrupt):
        return False
    # asyncio's handler raises in its own frame, the innermost one.
    codes = [frame.f_code for frame, _ in traceback.walk_tb(fault.__traceback__)]
    if isinstance(fault, Interrupt) or codes[-1:] == [asyncio.Runner._on_sigint.__code__]:  # type: ignore[attr-defined]
        return True
    # Python's default handler leaves no trace, but Ctrl-C must still work while it is installed.
    in_main_thread = threading.current_thread() is threading.main_thread()
    return in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def as_exception(fault: BaseException) -> Exception:
    """`fault` itself if it is an `Exception`, else a replacement. Raises if it is the user's Ctrl-C."""
    if isinstance(fault, Exception):
        return fault
    if is_interrupt(fault):
        raise fault
    return _replacement(fault).with_traceback(fault.__traceback__)  # which has the line of the user's file


def _replacement(fault: BaseException) -> Exception:
    if isinstance(fault, asyncio.CancelledError):
        return UserCodeError("it cancelled itself")
    if isinstance(fault, SystemExit):
        return UserCodeError(f"it called sys.exit({safe_text(fault.code, repr)})")
    if isinstance(fault, TimeLimitExceeded):
        return TimeLimitError(safe_text(fault))
    return UserCodeError(f"it raised {describe(fault)}")


def call_user_code(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function`; whatever it raises is an `Exception`."""
    try:
        return function(*args, **kwargs)
    except Exception:
        raise
    except BaseException as fault:
        raise as_exception(fault) from None


def call_part_within(limit_s: float, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`call_part` with a time limit: raises a `TimeLimitError` after it."""
    return call_part(lambda: call_within(limit_s, function, *args, **kwargs))


def call_part(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`call_user_code` for a part of the run itself, such as a loss, which may change torch's settings or the working
    folder of the whole process: they are restored."""
    torch: Any = sys.modules.get("torch")  # not imported here: if nobody has, there is nothing to restore
    before = {name: getattr(torch, name)() for name in _TORCH_STATE if torch is not None}
    folder = os.open(".", getattr(os, "O_PATH", os.O_RDONLY))  # a name could be removed or changed meanwhile
    try:
        return call_user_code(function, *args, **kwargs)
    finally:
        os.fchdir(folder)  # relative paths, such as the run's, would name other files
        os.close(folder)
        for name, value in before.items():
            if getattr(torch, name)() != value:
                getattr(torch, _TORCH_STATE[name])(value)


def describe_at(fault: BaseException) -> str:
    """The description in one line, with the line of the user's file: `ValueError: no such city (mine.py:12)`."""
    return f"{' '.join(describe(fault).split())}{user_location(fault)}"


async def await_user_code(work: Awaitable[T]) -> T:
    """Await `work` in a separate task; a cancellation stays a cancellation."""
    task = asyncio.current_task()
    try:
        return await work
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as fault:
        if is_closing(fault, task):
            raise
        raise as_exception(fault) from None


def is_closing(fault: BaseException, task: asyncio.Task[Any] | None = None) -> bool:
    """Whether Python is closing a coroutine (of `task`, if known) that is no longer running."""
    if not isinstance(fault, GeneratorExit):
        return False
    try:
        current = asyncio.current_task()
    except RuntimeError:  # no loop is running
        return True
    return current is None or (task is not None and current is not task)


def describe(fault: BaseException) -> str:
    """`ValueError: no such city`, even if the exception's `__str__` fails, and of bounded length."""
    kind = _name_of(type(fault))
    name, text = "RuntimeError" if kind == UserCodeError.__name__ else kind, safe_text(fault)
    return truncate_text(f"{name}: {text}", MAX_CHARS)


def user_location(fault: BaseException) -> str:
    """The line of the user's own file that led to `fault`, such as ` (metrics.py:12)`; empty if there is none."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(fault.__traceback__)]
    outside = [(file, line) for file, line in frames if not file.startswith(_PACKAGE) and _TORCH not in file]
    lines = [line for file, line in outside if file == outside[0][0]]
    return f" ({outside[0][0]}:{lines[-1]})" if outside else ""


def format_with_traceback(fault: BaseException) -> str:
    """`fault` with its traceback, for a log; `traceback.format_exception` would call its `__str__`."""
    return f"{''.join(traceback.format_tb(fault.__traceback__))}{describe(fault)}"


def safe_text(value: object, convert: Callable[[object], str] = str) -> str:
    """`convert(value)`, even if that fails."""
    try:
        return convert(value)
    except Exception as fault:
        return f"(its text could not be had: {type(fault).__name__})"
    except BaseException as fault:
        return f"(its text could not be had: {type(as_exception(fault)).__name__})"
