"""One large request to a server in a separate process: its cost, and its effect on other requests."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from raw_http import request, say

SERVE = """
import sys, torch
torch.set_num_threads(1)
from toolwise.models import load_model
from toolwise.policies.local import LocalPolicy
from toolwise.protocols import Sampling
from toolwise.serve import ServedModel, Server, build_app
policy = LocalPolicy(*load_model("builtin:small", device="cpu"), Sampling(max_new_tokens=4))
with Server(build_app(ServedModel.of(policy, "small"))) as server:
    print(server.port, flush=True)
    sys.stdin.read()
"""
HEALTH = request(method="GET", target="/health", headers=["Host: localhost"], length=False)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[int, int]]:
    """Its process and its port."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
        process.communicate("")


def peak_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def body(megabytes: float) -> bytes:
    text = "word and 12 " * int(megabytes * 1e6 / 12)
    return json.dumps({"model": "small", "messages": [{"role": "user", "content": text}]}).encode()


@pytest.mark.long
def test_large_bodies_are_refused_at_once_memory_is_flat_and_others_are_answered(server: tuple[int, int]) -> None:
    pid, port = server
    assert say(port, request(body(0.001))).status == 200
    before, waits, done = peak_mb(pid), list[float](), threading.Event()

    def ask() -> None:
        while not done.is_set():
            waits.append(say(port, HEALTH).seconds)
            time.sleep(0.01)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for megabytes, status in (8, 413), (31, 413), (1.3, 400), (0.3, 400):
            sent = request(body(megabytes))
            answer = say(port, sent)
            assert (megabytes, answer.status) == (megabytes, status)
            assert answer.seconds < 1
    finally:
        done.set()
        asking.join()
    assert max(waits) < 0.5
    assert peak_mb(pid) - before < 40
