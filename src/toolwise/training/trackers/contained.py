"""Calls the user's trackers and callbacks so that nothing they raise, except Ctrl-C, ends the run."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeVar

from toolwise.protocols import Callback, Tracker
from toolwise.types import CheckpointEvent, EndEvent, RunStart, StepEvent, Stop, ValidationEvent
from toolwise.untrusted.user_code import as_exception, describe, user_location

log = logging.getLogger("toolwise.training.trackers")

MAX_FAILURES = 3
"""A tracker or callback is dropped when one of its methods has failed this many times in a row."""

P = ParamSpec("P")
T = TypeVar("T")
Event = TypeVar("Event", StepEvent, ValidationEvent, CheckpointEvent, EndEvent)


@dataclass(slots=True)
class Containment:
    """Counts the failures of one tracker or callback, logs the first, and drops it if they continue."""

    name: str
    """Such as `tracker metrics.py:Csv`."""
    errors: int = 0
    first_error: str | None = None
    dropped: bool = False
    _in_a_row: Counter[str] = field(default_factory=Counter)

    def call(self, name: str, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Call a method; None if it fails, or if it is no longer called."""
        if self.dropped:
            return None
        try:
            result = method(*args, **kwargs)
            _check_result(name, result)
        except BaseException as fault:
            self._count(name, f"{describe(as_exception(fault))}{user_location(fault)}")
            return None
        self._in_a_row[name] = 0
        return result

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "errors": self.errors,
            "first_error": self.first_error,
            "dropped": self.dropped,
        }

    def _count(self, method: str, error: str) -> None:
        self.errors += 1
        self._in_a_row[method] += 1
        if self.first_error is None:
            self.first_error = f"{method}: {' '.join(error.split())}"
            log.warning("%s failed in %s; the run goes on, later errors are only counted", self.name, self.first_error)
        if self._in_a_row[method] == MAX_FAILURES:
            self.dropped = True
            log.warning("%s failed %d times in a row in %s and is no longer called", self.name, MAX_FAILURES, method)


class ContainedTracker(Tracker):
    """A user's tracker."""

    def __init__(self, tracker: Tracker, name: str) -> None:
        self.containment = Containment(f"tracker {name}")
        self._tracker = tracker
        self._closed = False

    def start(self, run: RunStart) -> None:
        self.containment.call("start", self._tracker.start, run)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.containment.call("log", self._tracker.log, step, dict(metrics))

    def close(self) -> None:
        """Close it once, even if it was dropped: it may hold open files."""
        if not self._closed:
            self._closed, self.containment.dropped, dropped = True, False, self.containment.dropped
            self.containment.call("close", self._tracker.close)
            self.containment.dropped |= dropped


class ContainedCallback(Callback):
    """A user's callback."""

    def __init__(self, callback: Callback, name: str) -> None:
        self.containment = Containment(f"callback {name}")
        self._callback = callback

    def on_step(self, event: StepEvent) -> Stop | None:
        return self.containment.call("on_step", self._callback.on_step, _copy(event))

    def on_validation(self, event: ValidationEvent) -> Stop | None:
        return self.containment.call("on_validation", self._callback.on_validation, _copy(event))

    def on_checkpoint(self, event: CheckpointEvent) -> Stop | None:
        return self.containment.call("on_checkpoint", self._callback.on_checkpoint, _copy(event))

    def on_end(self, event: EndEvent) -> None:
        self.containment.call("on_end", self._callback.on_end, _copy(event))


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
