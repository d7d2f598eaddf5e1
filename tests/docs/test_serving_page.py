"""docs/serving.md: every snippet runs as it is written, but for the ports; each `toolwise serve` is a process."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from tests.docs import pages
from tests.docs.pages import Reader, Snippet, commands

pytestmark = pytest.mark.docs
PORTS = ("8000", "8001", "8002")


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def test_every_snippet_runs(reader: Callable[..., Reader], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openai")
    ports = {port: free_port() for port in PORTS}
    page = (pages.ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    for port, free in ports.items():
        page = page.replace(port, free)
    (tmp_path / "page.md").write_text(page, encoding="utf-8")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    environment = os.environ | {"TOOLWISE_KEY": "a-key-that-is-long-enough", "OMP_NUM_THREADS": "1"}
    servers: list[subprocess.Popen[bytes]] = []

    def start(snippet: Snippet) -> None:
        for command in commands(snippet.text):
            program, name, *arguments = shlex.split(command)
            assert (program, name) == ("toolwise", "serve")
            port = arguments[arguments.index("--port") + 1] if "--port" in arguments else ports["8000"]
            whole = [sys.executable, "-m", "toolwise", name, *arguments, "--port", port]
            servers.append(subprocess.Popen(whole, env=environment))
            wait_until_ready(port, servers[-1])

    try:
        reader("page.md", handlers={"sh": start}).read()
    finally:
        for server in servers:
            server.send_signal(signal.SIGTERM)
        assert [server.wait(30) for server in servers] == [0, 0, 0]


def wait_until_ready(port: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"no server at port {port}")
