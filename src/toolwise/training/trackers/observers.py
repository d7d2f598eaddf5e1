"""Builds the user's trackers and callbacks from the configuration and from Python objects."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolwise.config.components import check_kwargs, create, is_factory
from toolwise.config.imports import check_nameable, did_you_mean, load_reference
from toolwise.config.loader import build_config
from toolwise.config.trainer import ObserverEntry, TrainerConfig
from toolwise.errors import ConfigError
from toolwise.protocols import Callback, Metrics, Tracker
from toolwise.training.trackers.contained import ContainedObserver
from toolwise.types import RunStart

TrackerSpec = str | Mapping[str, Any] | ObserverEntry | Tracker | Callable[..., Tracker]
CallbackSpec = str | Mapping[str, Any] | ObserverEntry | Callback | Callable[..., Callback]

METHODS: dict[str, tuple[str, ...]] = {
    "tracker": ("start", "log", "close"),
    "callback": ("on_step", "on_validation", "on_checkpoint", "on_end"),
}
_BASES: dict[str, type] = {"tracker": Tracker, "callback": Callback}


@dataclass(slots=True)
class Observers:
    """The trackers and callbacks that a user gave to a run."""

    trackers: list[ContainedObserver] = field(default_factory=list)
    callbacks: list[ContainedObserver] = field(default_factory=list)
    _reported: dict[str, int] = field(default_factory=dict)

    def create(self, sources: Sequence[ObserverSource]) -> None:
        """Create what `load_observers` found; raises a ConfigError if a constructor fails."""
        for source in sources:
            observers = self.trackers if source.kind == "tracker" else self.callbacks
            observers.append(ContainedObserver(source.create(), f"{source.kind} {source.name}"))

    def start(self, run: RunStart) -> None:
        for tracker in self.trackers:
            tracker.start(run)

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.close()

    def to_json(self) -> list[dict[str, Any]]:
        """What the summary says about each of them."""
        return [observer.to_json() for observer in (*self.trackers, *self.callbacks)]

    def error_metrics(self) -> Metrics:
        """`faults/tracker` and `faults/callback`: failed calls since the last time; empty if the user gave none."""
        observers = {"tracker": self.trackers, "callback": self.callbacks}
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
    config: TrainerConfig,
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
        target = load_reference(target, what=key)
    check_kwargs(target, kwargs, f"{key}: {name}", {})
    if not inspect.isroutine(target):
        _check_methods(target, kind, name)
    return ObserverSource(kind, name, target, kwargs)


def qualified_name(target: Any) -> str:
    definition = target if is_factory(target) else type(target)
    return f"{definition.__module__}:{definition.__qualname__}"


def _check_methods(target: Any, kind: str, name: str) -> None:
    """Raise unless an object, or the objects of a class, have all methods of the protocol, and none is async."""
    where = f"trainer.{kind}s: {name}"
    methods = {method: getattr(target, method, None) for method in METHODS[kind]}
    missing = [method for method, value in methods.items() if not callable(value)]
    if missing:
        base = _BASES[kind].__name__
        raise ConfigError(f"{where} is not a {kind}: it has no {', '.join(missing)}; subclass toolwise.{base}")
    for method, value in methods.items():
        if inspect.iscoroutinefunction(value):
            raise ConfigError(f"{where}: {method} is async; use a plain def, and threads for slow work")
    for method in dir(target) if kind == "callback" else ():
        if method.startswith("on_") and method not in methods:  # on_setp would never be called
            hint = did_you_mean(method, methods) or f"; rename it, a callback has {', '.join(methods)}"
            raise ConfigError(f"{where}: {method} is never called{hint}")
