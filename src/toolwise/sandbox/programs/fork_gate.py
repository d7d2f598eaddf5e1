"""The trainer's end of a program's forks, where the program asks for each of them (`layers/births.py`)."""

from __future__ import annotations

import os
import select
import socket
import struct
from contextlib import ExitStack, suppress

from toolwise.sandbox.faults import SandboxError
from toolwise.sandbox.layers.fork_filter import allow_fork
from toolwise.sandbox.process_usage import MAX_PROCESSES

_LISTENER = struct.Struct("i")


class ForkGate:
    """Lets each fork through, and counts them."""

    def __init__(self, closing: ExitStack) -> None:
        self.forks_seen = 0
        """Since the program was last looked at."""
        self._closing = closing
        self._channel: socket.socket | None = None
        self._listener: int | None = None
        self._poll: select.poll

    @property
    def reached_limit(self) -> bool:
        return self.forks_seen >= MAX_PROCESSES

    def open(self, theirs: ExitStack) -> int:
        """The end that the program is given, to be closed with `theirs`."""
        ours, given = socket.socketpair()
        self._channel = self._closing.enter_context(ours)
        return theirs.enter_context(given).fileno()

    def listen(self, poll: select.poll) -> None:
        self._poll = poll
        if self._channel is not None:
            poll.register(self._channel, select.POLLIN)

    def stop(self) -> None:
        """From now on whoever forks waits for ever."""
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
                self._poll.unregister(descriptor)  # nobody is left who could ask

    def _receive(self, channel: socket.socket) -> int | None:
        """None where births are free."""
        # Not `recv_fds`: whatever else is started in this process must not inherit the listener.
        said, given, _, _ = channel.recvmsg(1, socket.CMSG_LEN(_LISTENER.size), socket.MSG_CMSG_CLOEXEC)
        if not said:
            return None
        if not given:
            raise SandboxError("a program's listener did not come through: are there too many open files?")
        (listener,) = _LISTENER.unpack(given[0][2])
        self._closing.callback(os.close, listener)
        self._poll.register(listener, select.POLLIN)
        return int(listener)

    def _allow(self, listener: int) -> None:
        """Those who wait already, without another round of everything else."""
        ready = select.poll()
        ready.register(listener, select.POLLIN)
        while not self.reached_limit:
            try:
                allow_fork(listener)
            except OSError as fault:
                raise SandboxError(f"a program's births cannot be answered: {fault}") from None
            self.forks_seen += 1
            if not any(event & select.POLLIN for _, event in ready.poll(0)):
                return
