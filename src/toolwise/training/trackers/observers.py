"""The user's trackers and callbacks: built from the configuration and from Python objects, and called so that nothing
they raise, except Ctrl-C, ends the run."""

from __future__ import annotations

import importlib.util
import inspect
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from toolwise.config.components import check_kwargs, create, is_factory
from toolwise.config.imports import check_nameable, did_you_mean, load_reference
from toolwise.config.loader import build_config
from toolwise.config.trainer import ObserverEntry, ObserverSettings
from toolwise.errors import ConfigError, MissingExtraError
from toolwise.protocols import Callback, Metrics, Tracker
from toolwise.training.trackers.dashboard import Dashboard
from toolwise.types import CheckpointEvent, EndEvent, RunStart, StepEvent, Stop, ValidationEvent
from toolwise.untrusted.limited_thread import LimitedThread
from toolwise.untrusted.time_limit import TimeLimitError
from toolwise.untrusted.user_code import call_part, call_part_within, describe_at, user_location

log = logging.getLogger("toolwise.training.trackers")

TrackerSpec = str | Mapping[str, Any] | ObserverEntry | Tracker | Callable[..., Tracker]
CallbackSpec = str | Mapping[str, Any] | ObserverEntry | Callback | Callable[..., Callback]

METHODS: dict[str, tuple[str, ...]] = {
    "tracker": ("start", "log", "close"),
    "callback": ("on_step", "on_validation", "on_checkpoint", "on_end"),
}
TRACKERS = {
    "tensorboard": "toolwise.training.trackers.tensorboard:TensorBoardTracker",
    "wandb": "toolwise.training.trackers.wandb:WandbTracker",
    "mlflow": "toolwise.training.trackers.mlflow:MlflowTracker",
}
"""Trackers that come with Toolwise, by the name of their package, which is an extra."""

DEFAULT_LIMIT_S = ObserverSettings().observer_timeout_s
MAX_FAILURES = 3
"""A tracker or callback is dropped when one of its methods has failed this many times in a row."""
Event = TypeVar("Event", StepEvent, ValidationEvent, CheckpointEvent, EndEvent)


class ContainedObserver(Tracker, Callback):
    """A user's tracker or callback: counts its failures, logs the first, and drops it if they continue."""

    def __init__(self, observer: Any, name: str, limit_s: float = DEFAULT_LIMIT_S) -> None:
        """`name`: such as `tracker metrics.py:Csv`; `limit_s`: time limit of each call."""
        self.name, self.limit_s = name, limit_s
        self.errors = 0
        self.first_error: str | None = None
        self.dropped = False
        self._observer, self._closed = observer, False
        self._in_a_row: Counter[str] = Counter()
        self._thread = LimitedThread(f"toolwise {name}")

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

    def release(self) -> None:
        """End its thread, if it has one; another call would start another."""
        self._thread.close()

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
            result = self._within_limit(method, *args)
            _check_result(name, result)
        except TimeLimitError as fault:
            self._count(name, f"took longer than trainer.observer_timeout_s = {self.limit_s:g}{user_location(fault)}")
            self._drop(f"{self.name} is no longer called")
            return None
        except Exception as fault:
            self._count(name, describe_at(fault))
            return None
        self._in_a_row[name] = 0
        return result

    def _within_limit(self, method: Callable[..., Stop | None], *args: Any) -> Stop | None:
        """Signals interrupt the main thread only. Elsewhere, as in a notebook, the observer has a thread of its own,
        which is abandoned if it takes too long."""
        if threading.current_thread() is threading.main_thread():
            return call_part_within(self.limit_s, method, *args)
        return call_part(self._thread.call, self.limit_s, method, *args)

    def _count(self, method: str, error: str) -> None:
        self.errors += 1
        self._in_a_row[method] += 1
        if self.first_error is None:
            self.first_error = f"{method}: {error}"
            log.warning("%s failed in %s; the run goes on, later errors are only counted", self.name, self.first_error)
        if self._in_a_row[method] == MAX_FAILURES:
            self._drop(f"{self.name} failed {MAX_FAILURES} times in a row in {method} and is no longer called")

    def _drop(self, why: str) -> None:
        self.dropped = True
        if not self._closed:
            log.warning("%s", why)


@dataclass(slots=True)
class Observers:
    """The trackers and callbacks that a user gave to a run."""

    trackers: list[ContainedObserver] = field(default_factory=list)
    callbacks: list[ContainedObserver] = field(default_factory=list)
    limit_s: float = DEFAULT_LIMIT_S
    """Time limit of each of their calls."""
    _reported: dict[str, int] = field(default_factory=dict)

    def create(self, sources: Sequence[ObserverSource]) -> None:
        """Create what `load_observers` found; raises a ConfigError if a constructor fails."""
        for source in sources:
            created = source.create()
            observer = ContainedObserver(created, f"{source.kind} {source.name}", self.limit_s)
            (self.trackers if source.kind == "tracker" else self.callbacks).append(observer)
            if source.kind == "tracker" and isinstance(created, Dashboard):  # it also sends rollouts
                self.callbacks.append(observer)

    def start(self, run: RunStart) -> None:
        for tracker in self.trackers:
            tracker.start(run)

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.close()
        for observer in (*self.trackers, *self.callbacks):
            observer.release()

    def to_json(self) -> list[dict[str, Any]]:
        """What the summary says about each of them."""
        return [observer.to_json() for observer in dict.fromkeys((*self.trackers, *self.callbacks))]

    def error_metrics(self) -> Metrics:
        """`faults/tracker` and `faults/callback`: failed calls since the last time; empty if the user gave none."""
        callbacks = [one for one in self.callbacks if one not in self.trackers]
        observers = {"tracker": self.trackers, "callback": callbacks}
        totals = {kind: sum(one.errors for one in members) for kind, members in observers.items() if members}
        metrics = {f"faults/{kind}": float(total - self._reported.get(kind, 0)) for kind, total in totals.items()}
        self._reported = totals
        return metrics


@dataclass(frozen=True, slots=True)
class ObserverSource:
    """A tracker or callback before it is created: its class, a function that returns it, or the object itself."""

    kind: str
    name: str
    target: Any
    kwargs: Mapping[str, Any]

    def create(self) -> Any:
        observer = create(self.target, self.kwargs, f"trainer.{self.kind}s: {self.name}")
        _check_methods(observer, self.kind, self.name)
        return observer


def load_observers(
    config: ObserverSettings,
    trackers: Sequence[TrackerSpec] | TrackerSpec | None = None,
    callbacks: Sequence[CallbackSpec] | CallbackSpec | None = None,
) -> list[ObserverSource]:
    """Import the configured trackers and callbacks, followed by those given in Python, without creating them."""
    return [
        *(_load(entry, "tracker") for entry in (*config.trackers, *observer_entries(trackers))),
        *(_load(entry, "callback") for entry in (*config.callbacks, *observer_entries(callbacks))),
    ]


def observer_entries(specs: Any) -> list[Any]:
    """Normalize to a list: `trackers=t` means `trackers=[t]`."""
    if specs is None:
        return []
    return list(specs) if isinstance(specs, list | tuple) else [specs]


def _load(entry: Any, kind: str) -> ObserverSource:
    key = f"trainer.{kind}s"
    if isinstance(entry, Mapping):
        entry = build_config(ObserverEntry, dict(entry), source=key)
    target, kwargs = (entry.name, entry.kwargs) if isinstance(entry, ObserverEntry) else (entry, {})
    name = target if isinstance(target, str) else qualified_name(target)
    if isinstance(target, str):
        check_nameable(target, key, f"; --set {key}=[] continues without it")
        target = _load_named(target) if kind == "tracker" and ":" not in target else load_reference(target, what=key)
    check_kwargs(target, kwargs, f"{key}: {name}", {})
    if not inspect.isroutine(target):
        _check_methods(target, kind, name)
    return ObserverSource(kind, name, target, kwargs)


def _load_named(name: str) -> Any:
    """A tracker that comes with Toolwise; raises before the run begins if its package is not installed."""
    if name not in TRACKERS:
        hint = did_you_mean(name, TRACKERS) or f"; use {', '.join(TRACKERS)}, or path/to/file.py:Name for your own"
        raise ConfigError(f"trainer.trackers: there is no tracker {name!r}{hint}")
    if importlib.util.find_spec(name) is None:
        raise MissingExtraError(f"trainer.trackers: {name}", name)
    return load_reference(TRACKERS[name], what="trainer.trackers")


def qualified_name(target: Any) -> str:
    definition = target if is_factory(target) else type(target)
    return f"{definition.__module__}:{definition.__qualname__}"


def _check_methods(target: Any, kind: str, name: str) -> None:
    """Raise unless an object, or the objects of a class, have all methods of the protocol, and none is async."""
    where = f"trainer.{kind}s: {name}"
    methods = {method: getattr(target, method, None) for method in METHODS[kind]}
    missing = [method for method, value in methods.items() if not callable(value)]
    if missing:
        raise ConfigError(
            f"{where} is not a {kind}: it has no {', '.join(missing)}; subclass toolwise.{kind.capitalize()}"
        )
    for method, value in methods.items():
        if inspect.iscoroutinefunction(value):
            raise ConfigError(f"{where}: {method} is async; use a plain def, and threads for slow work")
    for method in dir(target) if kind == "callback" else ():
        if method.startswith("on_") and method not in methods:  # on_setp would never be called
            hint = did_you_mean(method, methods) or f"; rename it, a callback has {', '.join(methods)}"
            raise ConfigError(f"{where}: {method} is never called{hint}")


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
