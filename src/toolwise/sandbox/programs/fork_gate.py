"""The trainer's end of the fork filter (`layers/seccomp.py`): approves each fork of a program."""

from __future__ import annotations

import os
import select
import socket
from contextlib import ExitStack, suppress

from toolwise.sandbox.faults import SandboxError
from toolwise.sandbox.layers.seccomp import allow_fork
from toolwise.sandbox.process_limits import MAX_PROCESSES
from toolwise.sandbox.processes import open_channel, receive_descriptors


class ForkGate:
    """Approves forks and counts them."""

    def __init__(self, closing: ExitStack) -> None:
        self.forks_seen = 0
        """Forks since the program's processes were last counted."""
        self._closing = closing
        self._channel: socket.socket | None = None
        self._listener: int | None = None
        self._poll: select.poll

    @property
    def reached_limit(self) -> bool:
        return self.forks_seen >= MAX_PROCESSES

    def open(self, theirs: ExitStack) -> int:
        """Create the channel. Returns the program's end, which is closed with `theirs`."""
        self._channel, child_end = open_channel(self._closing, theirs)
        return child_end

    def listen(self, poll: select.poll) -> None:
        self._poll = poll
        if self._channel is not None:
            poll.register(self._channel, select.POLLIN)

    def stop(self) -> None:
        """Stop answering: from now on every fork blocks forever."""
        for descriptor in (self._channel.fileno() if self._channel is not None else None, self._listener):
            if descriptor is not None:
                with suppress(KeyError):
                    self._poll.unregister(descriptor)

    def answer(self, ready: list[tuple[int, int]]) -> None:
        for descriptor, event in ready:
            if self._channel is not None and descriptor == self._channel.fileno():
                self._poll.unregister(descriptor)
                self._listener = self._receive(self._channel)
            elif descriptor == self._listener and event & select.POLLIN:
                self._allow(descriptor)
            elif descriptor == self._listener and event & (select.POLLHUP | select.POLLNVAL):
                self._poll.unregister(descriptor)  # no process is left that could fork

    def _receive(self, channel: socket.socket) -> int | None:
        """The listener; None if forks are not held."""
        data, descriptors = receive_descriptors(channel, 1, 1)
        if not data:
            return None
        if not descriptors:
            raise SandboxError("the fork listener of a program did not arrive: are there too many open files?")
        [listener] = descriptors
        self._closing.callback(os.close, listener)
        self._poll.register(listener, select.POLLIN)
        return listener

    def _allow(self, listener: int) -> None:
        """Answer all forks that are already waiting."""
        ready = select.poll()
        ready.register(listener, select.POLLIN)
        while not self.reached_limit:
            try:
                allow_fork(listener)
            except OSError as fault:
                raise SandboxError(f"cannot approve a program's forks: {fault}") from None
            self.forks_seen += 1
            if not any(event & select.POLLIN for _, event in ready.poll(0)):
                return
