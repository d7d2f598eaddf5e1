"""Findings for a person: on the live console, or in the log where a run has none."""

from __future__ import annotations

import logging

from toolwise.training.diagnosis.monitor import FindingChanges
from toolwise.training.trackers.console import ConsoleTracker

log = logging.getLogger("toolwise.training.diagnosis")


def show_changes(changes: FindingChanges, console: ConsoleTracker | None) -> None:
    """Each finding once, when it is made; one that a later step disproved is taken back."""
    for finding in changes.found:
        if console is None:
            log.warning("%s", finding)
        else:
            console.warn(finding.kind, (finding.cause, finding.cure))
    for finding in changes.withdrawn:
        said = f"no longer true: {finding.kind} (found at step {finding.step})"
        if console is None:
            log.warning("%s", said)
        else:
            console.note(said)
