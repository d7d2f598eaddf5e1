"""Ctrl-C and SIGTERM: the first finishes the step and saves, the second stops immediately."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from toolwise.terminal import print_line
from toolwise.untrusted.user_code import Interrupt


class StopSignal:
    """Whether a signal has asked the run to end."""

    def __init__(self) -> None:
        self.received = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle signals here. Uses plain handlers: the event loop's would not run until an update has finished."""
        if threading.current_thread() is not threading.main_thread():
            yield  # signal handlers can only be set in the main thread
            return
        before = {number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            raise Interrupt
        self.received = True
        print_line(
            f"\n{signal.Signals(number).name}: finishing this step and saving; repeat to stop immediately", err=True
        )
