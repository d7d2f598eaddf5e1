"""Servers that toolwise starts: with the options training needs, and stopped with their parent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from process_state import is_running

from toolwise.errors import ConfigError, PolicyError
from toolwise.policies.vllm.server import VllmServer

SERVER = """
import json, os, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

child = subprocess.Popen(["sleep", "600"])  # vLLM's engine is a separate process

class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        told = {"argv": sys.argv[1:], "mode": os.environ["VLLM_SERVER_DEV_MODE"], "pids": [os.getpid(), child.pid]}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(told).encode())
    def log_message(self, *_):
        pass

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Answer).serve_forever()
"""


def command(folder: Path, text: str = SERVER) -> list[str]:
    (folder / "server.py").write_text(text, encoding="utf-8")
    return [sys.executable, str(folder / "server.py")]


def start(words: list[str], start_s: float = 30.0) -> VllmServer:
    return VllmServer(words, Path("/models/w"), tokenizer="/models/t", dtype="float32", start_s=start_s)


def told_by(server: VllmServer) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{server.base_url}/anything").json()
    return found


def wait_until_gone(pids: list[int]) -> None:
    ends = time.monotonic() + 20
    while any(is_running(pid) for pid in pids) and time.monotonic() < ends:
        time.sleep(0.05)
    assert not any(is_running(pid) for pid in pids)


def test_it_is_started_with_what_training_needs_and_ended_whole(tmp_path: Path) -> None:
    server = start([*command(tmp_path), "--mine", "1"])
    told = told_by(server)
    argv = told["argv"]
    assert argv[:2] == ["--mine", "1"]
    options = dict(zip(argv[2::2], argv[3::2], strict=True))
    assert (options["--model"], options["--tokenizer"], options["--dtype"]) == ("/models/w", "/models/t", "float32")
    assert (options["--logprobs-mode"], options["--host"]) == ("processed_logprobs", "127.0.0.1")
    assert told["mode"] == "1"
    assert all(is_running(pid) for pid in told["pids"])
    server.close()
    wait_until_gone(told["pids"])
    server.close()  # closing twice is harmless


def test_the_model_is_the_first_word_after_serve(tmp_path: Path) -> None:
    server = start([*command(tmp_path), "serve", "--mine", "1"])
    assert told_by(server)["argv"][:4] == ["serve", "/models/w", "--mine", "1"]
    server.close()


def test_it_ends_when_whoever_started_it_is_killed(tmp_path: Path) -> None:
    starter = (
        "import json, os, sys, httpx; from pathlib import Path\n"
        "from toolwise.policies.vllm.server import VllmServer\n"
        "server = VllmServer(sys.argv[1:], Path('w'), tokenizer='t', dtype='float32', start_s=30)\n"
        "print(httpx.get(server.base_url + '/x').text, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", starter, *command(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | {"TMPDIR": str(tmp_path)},  # what a killed process cannot remove
    )
    assert done.returncode == -9
    wait_until_gone(json.loads(done.stdout)["pids"])


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.vllm\.command: 'no-such-vllm' cannot be started") as fault:
        start(["no-such-vllm", "serve"])
    assert "\n" not in str(fault.value)


def test_one_that_ends_at_once_has_the_last_word(tmp_path: Path) -> None:
    text = "import sys; print('ValueError: no such model'); print('bye'); sys.exit(3)"
    with pytest.raises(PolicyError, match="exited with status 3 before it was ready: ValueError: no such model"):
        start(command(tmp_path, text))


def test_one_that_never_answers_is_ended(tmp_path: Path) -> None:
    text = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    with pytest.raises(PolicyError, match=r"was not ready within 1\.5 s: raise rollout\.vllm\.start_s"):
        start(command(tmp_path, text), start_s=1.5)
    wait_until_gone([int((tmp_path / "pid").read_text())])
