"""A process dies with its parent, and when the liveness pipe closes."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's calls are Linux's")
SOURCE = (
    "import os, sys, time\nfrom toolwise.sandbox.layers.kernel import die_with_trainer\n"
    "die_with_trainer(int(sys.argv[1]), int(sys.argv[2]))\nprint('up', flush=True)\nsum(range(10**12))\n"
)


def _start(life: int, parent: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", SOURCE, str(life), str(parent)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=[life], env=environment)


def test_a_closed_pipe_ends_a_loop_in_c() -> None:
    read, write = os.pipe()
    process = _start(read, os.getpid())
    os.close(read)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    os.close(write)
    assert process.wait(timeout=10) == -9
    process.stdout.close()


def test_a_parent_that_is_another_ends_it_at_once() -> None:
    read, write = os.pipe()
    process = _start(read, 1 if os.getpid() != 1 else 2)
    began = time.monotonic()
    assert process.wait(timeout=20) == 1
    assert time.monotonic() - began < 20
    assert process.stdout is not None
    process.stdout.close()
    os.close(read)
    os.close(write)
