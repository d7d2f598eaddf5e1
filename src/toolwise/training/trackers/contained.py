"""Calls the user's trackers and callbacks so that nothing they raise, except Ctrl-C, ends the run."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from toolwise.protocols import Callback, Tracker
from toolwise.types import CheckpointEvent, EndEvent, RunStart, StepEvent, Stop, ValidationEvent
from toolwise.untrusted.user_code import as_exception, describe, user_location

log = logging.getLogger("toolwise.training.trackers")

MAX_FAILURES = 3
"""A tracker or callback is dropped when one of its methods has failed this many times in a row."""

Event = TypeVar("Event", StepEvent, ValidationEvent, CheckpointEvent, EndEvent)


class ContainedObserver(Tracker, Callback):
    """A user's tracker or callback: counts its failures, logs the first, and drops it if they continue."""

    def __init__(self, observer: Any, name: str) -> None:
        """`name`: such as `tracker metrics.py:Csv`."""
        self.name = name
        self.errors = 0
        self.first_error: str | None = None
        self.dropped = False
        self._observer, self._closed = observer, False
        self._in_a_row: Counter[str] = Counter()

    def start(self, run: RunStart) -> None:
        self._call("start", self._observer.start, run)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call("log", self._observer.log, step, dict(metrics))

    def close(self) -> None:
        """Close it once, even if it was dropped: it may hold open files."""
        if not self._closed:
            self._closed, self.dropped, dropped = True, False, self.dropped
            self._call("close", self._observer.close)
            self.dropped |= dropped

    def on_step(self, event: StepEvent) -> Stop | None:
        return self._call("on_step", self._observer.on_step, _copy(event))

    def on_validation(self, event: ValidationEvent) -> Stop | None:
        return self._call("on_validation", self._observer.on_validation, _copy(event))

    def on_checkpoint(self, event: CheckpointEvent) -> Stop | None:
        return self._call("on_checkpoint", self._observer.on_checkpoint, _copy(event))

    def on_end(self, event: EndEvent) -> None:
        self._call("on_end", self._observer.on_end, _copy(event))

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("name", "errors", "first_error", "dropped")}

    def _call(self, name: str, method: Callable[..., Stop | None], *args: Any) -> Stop | None:
        """Call a method; None if it fails, or if it is no longer called."""
        if self.dropped:
            return None
        try:
            result = method(*args)
            _check_result(name, result)
        except BaseException as fault:
            self._count(name, f"{describe(as_exception(fault))}{user_location(fault)}")
            return None
        self._in_a_row[name] = 0
        return result

    def _count(self, method: str, error: str) -> None:
        self.errors += 1
        self._in_a_row[method] += 1
        if self.first_error is None:
            self.first_error = f"{method}: {' '.join(error.split())}"
            log.warning("%s failed in %s; the run goes on, later errors are only counted", self.name, self.first_error)
        if self._in_a_row[method] == MAX_FAILURES:
            self.dropped = True
            log.warning("%s failed %d times in a row in %s and is no longer called", self.name, MAX_FAILURES, method)


def describe_observer_errors(observers: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each tracker and callback that failed, from the `observers` of a summary."""
    return [
        f"{entry['name']} failed {entry['errors']} time{'' if entry['errors'] == 1 else 's'}"
        f"{' and was dropped' if entry['dropped'] else ''}; first in {entry['first_error']}"
        for entry in observers
        if entry["errors"]
    ]


def _copy(event: Event) -> Event:
    """What a callback does to its metrics changes no one else's."""
    return replace(event, metrics=dict(event.metrics))


def _check_result(method: str, result: object) -> None:
    if inspect.iscoroutine(result):
        result.close()
        raise TypeError(f"{method} is a coroutine; use a plain def")
    if method.startswith("on_") and result is not None and not isinstance(result, Stop):
        raise TypeError(f"{method} returned a {type(result).__name__}; return None, or Stop(reason) to end the run")
