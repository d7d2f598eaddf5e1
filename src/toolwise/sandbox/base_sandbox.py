"""What the sandboxes of rewards and programs have in common: settings, the layers they get, and an orderly end."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from toolwise.sandbox.layers.hardening import Plan
from toolwise.sandbox.report import Report

LIVE_SANDBOXES: weakref.WeakSet[BaseSandbox] = weakref.WeakSet()
"""Those that are complete: closed when the interpreter exits, and reset in a forked child."""


class BaseSandbox:
    """Settings and layers of a sandbox. A subclass adds itself to `LIVE_SANDBOXES`."""

    def __init__(
        self,
        report: Report,
        layers: Iterable[str],
        read: Iterable[str | Path],
        *,
        memory_mb: int,
        file_mb: int,
        cpu_s: int,
    ) -> None:
        self.tier, self.permissions, self._report = report.requested, report.permissions, report
        readable = tuple(str(Path(path).expanduser().resolve()) for path in read)
        limits = (memory_mb, file_mb, cpu_s)
        self._plan = Plan(tuple(layers), "", readable, *limits, report.permissions, own_disk=report.own_disk)

    def report(self) -> Report:
        """Requested and active layers."""
        return self._report

    def close(self) -> None:
        raise NotImplementedError

    def _after_fork(self) -> None:
        raise NotImplementedError

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()


def _close_all() -> None:
    for sandbox in list(LIVE_SANDBOXES):
        sandbox.close()


def _reset_all_after_fork() -> None:
    for sandbox in list(LIVE_SANDBOXES):
        sandbox._after_fork()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_reset_all_after_fork)
