"""Kills a sandbox process when the trainer dies. Called first in every process that the sandbox starts."""

from __future__ import annotations

import fcntl
import os
import signal
import sys

from toolwise.sandbox.layers.kernel import die_with_parent


def die_with_trainer(liveness_fd: int, parent: int) -> None:
    """Have the kernel kill this process when the trainer dies, even while C code holds the GIL.

    `liveness_fd` is the read end of a pipe whose write end the trainer holds; `parent` is the pid of the process that
    started this one.
    """
    if sys.platform != "linux":
        return
    die_with_parent(parent)
    # A pipe without data signals its reader once: when the last writer closes.
    fcntl.fcntl(liveness_fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(liveness_fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(liveness_fd, fcntl.F_SETFL, fcntl.fcntl(liveness_fd, fcntl.F_GETFL) | os.O_ASYNC)
