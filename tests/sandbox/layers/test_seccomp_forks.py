"""A process whose forks need approval, and one that cannot install the filter; see test_seccomp.py for its program."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the layers are Linux's")


def test_forks_are_not_held_without_kernel_support() -> None:
    """A process cannot have two filters with a listener."""
    source = (
        "import os, socket\nfrom toolwise.sandbox.layers import seccomp\n"
        "for _ in range(2):\n"
        "    ours, theirs = socket.socketpair()\n"
        "    seccomp.require_fork_approval(theirs.detach())\n"
        "    print(len(socket.recv_fds(ours, 1, 1)[1]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == ["1", "0"]
