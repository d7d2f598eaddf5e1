"""Shows findings on the live console, or logs them if there is none."""

from __future__ import annotations

import logging

from toolwise.training.diagnosis.monitor import FindingChanges
from toolwise.training.trackers.console import ConsoleTracker

log = logging.getLogger("toolwise.training.diagnosis")


def show_changes(changes: FindingChanges, console: ConsoleTracker | None) -> None:
    """Show new findings, and retract those that a later step disproved."""
    for finding in changes.found:
        if console is None:
            log.warning("%s", finding)
        else:
            console.warn(finding.kind, (finding.cause, finding.cure))
    for finding in changes.withdrawn:
        text = f"no longer true: {finding.kind} (found at step {finding.step})"
        if console is None:
            log.warning("%s", text)
        else:
            console.note(text)
