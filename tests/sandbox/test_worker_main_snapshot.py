"""State that a call leaves behind; detected in a separate process with a single thread."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def _changed(body: str) -> bool:
    source = (
        "import json, math, os, random, signal, sys, threading, time, builtins\n"
        "import toolwise.sandbox.harness\nfrom toolwise.messages import Message\n"
        "from toolwise.sandbox.worker_main import Snapshot\nsnapshot = Snapshot()\n"
        f"assert not snapshot.changed()\n{body}\nsnapshot.tidy()\n"
        "os.write(1, b'%d' % snapshot.changed())\nos._exit(0)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, env=environment)
    return done.stdout == "1"


@pytest.mark.parametrize(
    "body",
    [
        "math.sqrt = None",
        "builtins.open = None",
        "json.JSONEncoder.encode = None",
        "Message.to_openai = None",
        "random.Random.seed = None",
        "os.new_name = 1",
        "os.environ['X'] = '1'",
        "os.chdir('/')",
        "signal.signal(signal.SIGUSR1, signal.SIG_IGN)",
        "sys.setrecursionlimit(50)",
        "sys.path.append('x')",
        "threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
    ],
)
def test_changes_are_detected(body: str) -> None:
    assert _changed(body)


def test_honest_work_changes_nothing() -> None:
    assert not _changed("import re, decimal\njson.dumps({}); random.random(); signal.setitimer(signal.ITIMER_REAL, 60)")
