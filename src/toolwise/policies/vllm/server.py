"""Start a vLLM server with the options that training needs, wait until it is healthy, and stop it with this process."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from toolwise.errors import ConfigError, PolicyError

_SHUTDOWN_TIMEOUT_S = 20.0
# vLLM runs several processes. This script kills them all when its stdin closes, which happens however we exit.
_WATCHDOG_SCRIPT = 'read -r _; kill -s TERM -- "-$0"; sleep 5; kill -s KILL -- "-$0"'


class VllmServer:
    """`command` starts the server, such as ["vllm", "serve"] with any options; the model, the port, and what exact
    log-probs and weight transfer need are added."""

    def __init__(self, command: Sequence[str], model: Path, *, tokenizer: str, dtype: str, start_s: float) -> None:
        self._log = Path(tempfile.mkdtemp(prefix="toolwise-vllm-")) / "server.log"
        port = _free_port()
        self.base_url = f"http://127.0.0.1:{port}/v1"
        options = {
            "--tokenizer": tokenizer,
            "--served-model-name": "policy",
            "--dtype": dtype,
            "--logprobs-mode": "processed_logprobs",
            "--generation-config": "vllm",
            "--host": "127.0.0.1",
            "--port": str(port),
        }
        arguments = [*_serve_command(command, str(model)), *(part for pair in options.items() for part in pair)]
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={"VLLM_NO_USAGE_STATS": "1"} | os.environ | {"VLLM_SERVER_DEV_MODE": "1"},
                    start_new_session=True,  # the trainer handles Ctrl-C: it finishes the step first
                )
        except OSError as fault:
            shutil.rmtree(self._log.parent, ignore_errors=True)
            raise ConfigError(
                f"rollout.vllm.command: {command[0]!r} cannot be started ({fault.strerror}): install vLLM in an "
                "separate environment and give the path of its program, or set rollout.vllm.base_url"
            ) from None
        watchdog = subprocess.Popen(
            ["sh", "-c", _WATCHDOG_SCRIPT, str(self._process.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._end = weakref.finalize(self, _end, self._process, watchdog, self._log.parent)
        try:
            self._wait_until_healthy(start_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._end()

    def _wait_until_healthy(self, start_s: float) -> None:
        import httpx

        deadline = time.monotonic() + start_s
        while time.monotonic() < deadline:
            if (status := self._process.poll()) is not None:
                raise PolicyError(f"vLLM exited with status {status} before it was ready: {self._last_log_line()}")
            try:
                if httpx.get(f"{self.base_url.removesuffix('/v1')}/health", timeout=5.0).is_success:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        raise PolicyError(
            f"vLLM was not ready within {start_s:g} s: raise rollout.vllm.start_s ({self._last_log_line()})"
        )

    def _last_log_line(self) -> str:
        """The last line of the log that mentions an error, else the last line."""
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line or "error:" in line]
        return (errors or lines or ["its log is empty"])[-1][:300]


def _end(process: subprocess.Popen[bytes], watchdog: subprocess.Popen[bytes], log_folder: Path) -> None:
    """SIGTERM, then SIGKILL to the whole process group, because vLLM's engine is a separate process."""
    with suppress(subprocess.TimeoutExpired):
        process.terminate()
        process.wait(_SHUTDOWN_TIMEOUT_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    watchdog.kill()
    watchdog.communicate()
    shutil.rmtree(log_folder, ignore_errors=True)


def _serve_command(command: Sequence[str], model: str) -> list[str]:
    """`vllm serve` takes the model as an argument, `python -m vllm.entrypoints.openai.api_server` as an option."""
    if "serve" not in command:
        return [*command, "--model", model]
    index = list(command).index("serve") + 1
    return [*command[:index], model, *command[index:]]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
