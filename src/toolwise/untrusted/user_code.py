"""What other people's code raises: always an ordinary `Exception`, unless it is the user's own Ctrl-C.

A tool, a world, a policy or a reward may raise `KeyboardInterrupt`, `SystemExit`, `GeneratorExit` or a `BaseException`
of its own (a panic of a Rust extension is one). None of them may end a run: asyncio would let the first two out of the
event loop, and most code lets the others pass.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, TypeVar

from toolwise.untrusted.bounds import truncate_text

P = ParamSpec("P")
T = TypeVar("T")

_name_of: Callable[[type], str] = type.__dict__["__name__"].__get__  # whatever a metaclass has to say of it
MAX_CHARS = 2000
"""Of what is told of a fault."""


class Interrupt(KeyboardInterrupt):
    """The user's Ctrl-C, as a signal handler of ours raises it."""


class UserCodeError(RuntimeError):
    """Stands for what would have ended the program, had it been let through."""


def is_interrupt(fault: BaseException) -> bool:
    """Whether `fault` came from a signal and not from a `raise` in somebody's code."""
    if not isinstance(fault, KeyboardInterrupt):
        return False
    if isinstance(fault, Interrupt) or _raised_by_runner(fault):
        return True
    # Python's own handler leaves no trace: whoever did not install another one must still be able to stop.
    here = threading.current_thread() is threading.main_thread()
    return here and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _raised_by_runner(fault: BaseException) -> bool:
    """asyncio's handler raises in a frame of its own, the innermost one."""
    trace = fault.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code is asyncio.Runner._on_sigint.__code__  # type: ignore[attr-defined]


def as_exception(fault: BaseException) -> Exception:
    """`fault` itself where it is an `Exception`; else one that stands for it. The user's Ctrl-C is raised."""
    if isinstance(fault, Exception):
        return fault
    if is_interrupt(fault):
        raise fault
    if isinstance(fault, asyncio.CancelledError):
        return UserCodeError("it cancelled itself")
    if isinstance(fault, SystemExit):
        return UserCodeError(f"it called sys.exit({_safe_text(fault.code, repr)})")
    return UserCodeError(f"it raised {describe(fault)}")


def call_user_code(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`function(…)`, whose faults are all exceptions."""
    try:
        return function(*args, **kwargs)
    except Exception:
        raise
    except BaseException as fault:
        raise as_exception(fault) from None


async def await_user_code(work: Awaitable[T]) -> T:
    """What `work` gives, for a task of its own; a cancellation stays one."""
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
    """Whether Python is closing a coroutine, of `task` where that is known, that nobody runs any more."""
    if not isinstance(fault, GeneratorExit):
        return False
    try:
        current = asyncio.current_task()
    except RuntimeError:  # no loop is running
        return True
    return current is None or (task is not None and current is not task)


def describe(fault: BaseException) -> str:
    """`ValueError: no such city`, whatever the fault's own `__str__` does, and of a bounded length."""
    kind = _name_of(type(fault))
    name, said = "RuntimeError" if kind == UserCodeError.__name__ else kind, _safe_text(fault, str)
    return truncate_text(f"{name}: {said}", MAX_CHARS)


def format_with_traceback(fault: BaseException) -> str:
    """`fault` with its traceback, for a log; `traceback.format_exception` would ask it for its text."""
    return f"{''.join(traceback.format_tb(fault.__traceback__))}{describe(fault)}"


def _safe_text(value: object, words: Callable[[object], str]) -> str:
    try:
        return words(value)
    except Exception as fault:
        return f"(its text could not be had: {type(fault).__name__})"
    except BaseException as fault:
        return f"(its text could not be had: {type(as_exception(fault)).__name__})"
