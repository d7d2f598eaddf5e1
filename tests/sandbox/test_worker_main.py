"""A worker process, driven frame by frame."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

from toolwise.sandbox import wire
from toolwise.sandbox.layers.hardening import Plan
from toolwise.sandbox.processes import Process, start_process


def _say(process: Process, message: dict[str, Any]) -> None:
    process.channel.sendall(wire.to_frame(wire.encode(message)))


def _hear(process: Process) -> dict[str, Any]:
    process.channel.settimeout(30)
    left, data = wire.HEADER.unpack(process.channel.recv(4, socket.MSG_WAITALL))[0], b""
    while left > len(data):
        data += process.channel.recv(left - len(data))
    return dict(json.loads(data))


def test_a_worker_reports_each_step(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def f(messages, truth): return truth")
    (tmp_path / "1").mkdir()
    process = start_process(tmp_path / "1")
    try:
        assert _hear(process) == {"ready": True, "pid": process.pid}
        plan = Plan(("limits",), str(tmp_path / "1"), memory_mb=256)
        _say(process, {"plan": plan.to_json(), "path": [], "reference": f"{tmp_path / 'r.py'}:f", "top": None})
        assert _hear(process) == {"folder": True}
        assert list(_hear(process)["layers"]) == ["limits"]
        assert _hear(process)["signature"]["mode"] == "pointwise"
        calls = [{"messages": [], "ground_truth": n} for n in range(3)]
        _say(process, {"id": "x", "calls": calls, "largest": 10_000})
        heard = [_hear(process) for _ in range(3)]
        assert [(h["id"], h["at"], h["state_changed"]) for h in heard] == [("x", n, False) for n in range(3)]
        _say(process, {"id": "y", "calls": calls[:1], "largest": 20})
        assert _hear(process)["answers"][0]["fault"]["kind"] == "too_big"
    finally:
        process.end(sweep=True)


def test_a_worker_ends_when_its_channel_closes(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    process = start_process(tmp_path / "1")
    assert _hear(process) == {"ready": True, "pid": process.pid}
    process.channel.close()
    end = time.monotonic() + 5
    while process.popen.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    assert process.popen.poll() is not None
    process.end(sweep=False)
