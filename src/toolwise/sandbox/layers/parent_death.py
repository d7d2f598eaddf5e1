"""What ties the life of a process to the trainer's: first thing in every process that the sandbox starts."""

from __future__ import annotations

import fcntl
import os
import signal
import sys

from toolwise.sandbox.layers.kernel import die_with_parent


def die_with_trainer(lifeline_fd: int, parent: int) -> None:
    """The kernel ends this process with the trainer, even while a loop in C holds the interpreter.

    `lifeline_fd` is the reading end of a pipe whose other end the trainer holds; `parent` the process that started
    this one.
    """
    if sys.platform != "linux":
        return
    die_with_parent(parent)
    # A pipe that nobody writes to signals its reader once: when the last writer is gone.
    fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline_fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, fcntl.fcntl(lifeline_fd, fcntl.F_GETFL) | os.O_ASYNC)
