"""Detects whether a call changed its worker's state: modules, signal handlers, working directory, environment, threads.

It protects an honest function's next call from leftovers of the last one. A hostile function shares this process and
can fool it, so the trainer's safety does not depend on it.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import gc
import os
import signal
import sys
import threading
from contextlib import suppress
from types import ModuleType
from typing import Any

_WATCHED = """
    builtins json json.encoder json.decoder math re os posixpath sys time random string statistics collections
    itertools functools operator datetime decimal copy
    toolwise.messages toolwise.types.results toolwise.types toolwise.rewards.function toolwise.sandbox.harness
"""
WATCHED = tuple(_WATCHED.split())  # those that are loaded when the function is
_SIGNALS = [
    int(number) for number in signal.valid_signals() if number not in (signal.SIGKILL, signal.SIGSTOP) and number < 32
]
# The C functions: signal.getsignal wraps each result in an enum, which is too slow for every call.
_clear_timer, _handler, _threads = _signal.setitimer, _signal.getsignal, threading.active_count
_collect, _cwd, _limit, _trace, _profile = gc.collect, os.getcwd, sys.getrecursionlimit, sys.gettrace, sys.getprofile


class Snapshot:
    """The state of the worker before the first call."""

    def __init__(self) -> None:
        namespaces = [vars(module) for name in WATCHED if isinstance(module := sys.modules.get(name), ModuleType)]
        own_modules = {name for name in WATCHED if name.startswith(("toolwise", "json", "random"))}
        classes = {
            value
            for namespace in namespaces
            for value in list(namespace.values())
            if isinstance(value, type) and value.__module__ in own_modules
        }
        self._spaces: list[Any] = [*namespaces, *(vars(cls) for cls in classes)]
        self._values = [list(namespace.values()) for namespace in self._spaces]
        self._process_state, self._handlers = self._observe(), _handlers()
        self._flush = [stream.flush for stream in (sys.stdout, sys.stderr)]
        gc.collect()
        gc.freeze()

    def _observe(self) -> tuple[Any, ...]:
        environment = os.environ._data if hasattr(os.environ, "_data") else dict(os.environ)
        streams = (sys.stdout, sys.stderr, sys.stdin)
        modules = (os.path, len(sys.meta_path), len(sys.path), len(sys.path_hooks))
        return (_cwd(), _limit(), _trace(), _profile(), dict(environment), streams, modules)

    def tidy(self) -> None:
        """Clean up what can be cleaned up: timers, and garbage whose finalizers belong to this call."""
        _clear_timer(_signal.ITIMER_REAL, 0)
        _clear_timer(_signal.ITIMER_VIRTUAL, 0)
        _clear_timer(_signal.ITIMER_PROF, 0)
        _collect()
        self.flush()

    def flush(self) -> None:
        """Flush printed output."""
        for flush in self._flush:
            with suppress(Exception):
                flush()

    def changed(self) -> bool:
        return _threads() != 1 or self.patched() or _handlers() != self._handlers

    def patched(self) -> bool:
        """The part of `changed` that works while calls overlap: they may use threads, their loop a signal handler."""
        try:
            # Lists compare by identity first, item by item in C: fast enough for every call.
            return [
                list(space.values()) for space in self._spaces
            ] != self._values or self._observe() != self._process_state
        except Exception:  # a deleted working directory, an object that cannot be compared
            return True


def _handlers() -> list[Any]:
    return [_handler(number) for number in _SIGNALS]
