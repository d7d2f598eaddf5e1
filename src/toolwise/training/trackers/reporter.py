"""Tells a run's own trackers and callbacks, and the user's, what happens in it; writes its metrics and summary."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolwise.config.trainer import ObserverSettings
from toolwise.protocols import Callback, Tracker
from toolwise.serialization.files import write_atomic
from toolwise.serialization.json_text import json_text
from toolwise.training.trackers.console import ConsoleTracker
from toolwise.training.trackers.jsonl import JsonlTracker
from toolwise.training.trackers.observers import ContainedObserver, Observers
from toolwise.types import CheckpointEvent, EndEvent, StepEvent, Stop, ValidationEvent
from toolwise.types.findings import Finding
from toolwise.untrusted.bounds import truncate_text

log = logging.getLogger("toolwise.training")


class Reporter:
    def __init__(
        self,
        out: Path,
        settings: ObserverSettings,
        observers: Observers | None = None,
        *,
        name: str,
        total_steps: int,
        first: Sequence[Callback] = (),
        last: Sequence[Callback] = (),
    ) -> None:
        """`observers` are the user's; unlike theirs, an error in `first` and `last`, called before and after them, ends
        the run."""
        self.out, self.observers = out, observers or Observers()
        self.metrics = JsonlTracker(out / "metrics.jsonl")
        self.console = ConsoleTracker(total_steps, title=name) if settings.console else None
        own = [self.console] if self.console is not None else []
        self._own_trackers: list[Tracker] = [self.metrics, *own]
        self._callbacks: list[Callback] = [*first, *own, *self.observers.callbacks, *last]
        self.stop_reason: str | None = None
        """Set when a callback stops the run."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for tracker in (*self._own_trackers, *self.observers.trackers):
            tracker.log(step, metrics)

    def notify(self, method: str, event: StepEvent | ValidationEvent | CheckpointEvent, *, unfinished: bool) -> None:
        """Call a method of all callbacks. The first `Stop` gives the reason; after the last step it has no effect."""
        for callback in self._callbacks:
            stop: Stop | None = getattr(callback, method)(event)
            if stop is not None and self.stop_reason is None and unfinished:
                name = callback.name if isinstance(callback, ContainedObserver) else type(callback).__name__
                self.stop_reason = f"{name}: {truncate_text(' '.join(stop.reason.split()), 300)}"
                self.announce(f"{self.stop_reason}; finishing this step and saving", logging.WARNING)

    def announce(self, text: str, level: int = logging.INFO) -> None:
        """Show `text` on the console, or log it if there is none. Does nothing if it is empty."""
        if text and self.console is not None:
            self.console.note(text)
        elif text:
            log.log(level, "%s", text)

    def warn(self, findings: Sequence[Finding]) -> None:
        """Show findings on the console, or log them if there is none."""
        for finding in findings:
            if self.console is not None:
                self.console.warn(finding.name, (finding.says, finding.cure))
            else:
                log.warning("%s", finding)

    def close(self) -> None:
        """Close the run's own trackers; the user's are closed last, by `summarize` or `observers.close`."""
        for tracker in self._own_trackers:
            tracker.close()

    def summarize(self, step: int, metrics: Mapping[str, float], summary: dict[str, Any]) -> dict[str, Any]:
        """Write summary.json, call `on_end` and close the user's trackers; return the summary with what failed in
        them."""
        summary["observers"] = self.observers.to_json()
        self.write_json("summary.json", summary)
        event = EndEvent(self.out, step, metrics, copy.deepcopy(summary))
        for callback in self._callbacks:
            callback.on_end(event)
        self.observers.close()
        summary["observers"] = self.observers.to_json()  # again, with what failed after that
        self.write_json("summary.json", summary)
        return summary

    def write_json(self, name: str, value: Any) -> None:
        write_atomic(self.out / name, json_text(value, indent=2).encode())
