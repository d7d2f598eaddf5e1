"""Renders chat templates in a child process with limits. They come with a model and are programs: jinja's sandbox keeps
them away from the process, but bounds neither time nor memory, and neither can be bounded from inside it.

One process serves all templates; it is started on first use and again after a template had to be killed. A rendering
that exceeds its limits raises `TemplateLimitError`, one that fails `TemplateFaultError`.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

import toolwise
from toolwise.errors import TemplateLimitError
from toolwise.rollout.template_main import ANSWER, HEADER, Limits

MAX_TEMPLATE_CHARS = 200_000
"""Published templates have up to thirty thousand."""
MAX_CPU_S = 1.0
"""CPU time of one rendering, plus one second per `BYTES_PER_S` of the conversation; usually it takes a millisecond."""
BYTES_PER_S = 200_000
MAX_MEMORY = 128 << 20
"""Bytes that one rendering may allocate, plus `GROWTH` per byte of the conversation."""
MAX_CHARS = 4 << 20
"""Length of the rendered text, plus `GROWTH` per byte of the conversation."""
GROWTH = 64
MAX_WAIT_S = 300.0
"""How long to wait for an answer on a machine that is too busy to run the process."""
KEPT_TEXTS, MAX_KEPT_BYTES = 256, 1 << 18
"""How many of the last texts are kept, and the largest conversation and text that are."""
_BOOT = "import sys; sys.path += sys.argv[1:]; from toolwise.rollout.template_main import main; main()"


class TemplateFaultError(Exception):
    """The template raised an exception; the message is the template's own."""


class _ProcessEndedError(Exception):
    pass


class TemplateProcess:
    """Renders one template at a time, for all threads of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._popen: subprocess.Popen[bytes] | None = None
        self._texts: OrderedDict[bytes, str] = OrderedDict()
        """The last texts by what they were rendered from: the rollouts of a group start with the same prompt."""

    def render(self, source: str, variables: Mapping[str, Any], now: datetime) -> str:
        """The text that `source` writes for plain `variables`; `now` is what its clock shows."""
        if len(source) > MAX_TEMPLATE_CHARS:
            raise TemplateLimitError(f"it has {len(source)} characters, more than {MAX_TEMPLATE_CHARS}")
        payload = json.dumps((source, variables, now.isoformat()), default=str).encode("ascii")
        size = len(payload) - len(source)
        limits = Limits(MAX_CPU_S + size / BYTES_PER_S, MAX_MEMORY + GROWTH * size, MAX_CHARS + GROWTH * size)
        with self._lock:
            known = self._texts.get(payload)
            if known is not None:
                return known
            kind, text = self._answer(HEADER.pack(*limits, len(payload)) + payload, limits)
            if kind == b"t":
                return self._keep(payload, text.decode("utf-8", "surrogatepass"))
        reason = text.decode("utf-8")
        raise TemplateFaultError(reason) if kind == b"e" else TemplateLimitError(reason)

    def _keep(self, payload: bytes, text: str) -> str:
        if max(len(payload), len(text)) <= MAX_KEPT_BYTES:
            self._texts[payload] = text
            if len(self._texts) > KEPT_TEXTS:
                self._texts.popitem(last=False)
        return text

    def _answer(self, request: bytes, limits: Limits) -> tuple[bytes, bytes]:
        for _ in range(2):  # it may have been killed from outside
            try:
                kind, text = self._exchange(self._started(), request)
                if kind == b"l":
                    self.close()  # it may still hold what the template made
                return kind, text
            except _ProcessEndedError:
                code = self.close()
            except BaseException:  # what it answers now is for nobody
                self.close()
                raise
            if code == -signal.SIGPROF:
                return b"l", f"it still runs after {limits.cpu_s:.1f} s of CPU time: does it loop forever?".encode()
        return b"l", f"the process that renders it ends with status {code}".encode()

    def _exchange(self, popen: subprocess.Popen[bytes], request: bytes) -> tuple[bytes, bytes]:
        assert popen.stdin is not None
        assert popen.stdout is not None
        requests, answers = popen.stdin.fileno(), popen.stdout.fileno()
        until = time.monotonic() + MAX_WAIT_S
        try:
            _write(requests, request, until)
            kind, length = ANSWER.unpack(_read(answers, ANSWER.size, until))
            return kind, _read(answers, length, until)
        except OSError as fault:
            raise _ProcessEndedError from fault

    def _started(self) -> subprocess.Popen[bytes]:
        if self._popen is None:
            folders = [str(Path(module.__file__ or "").parents[1]) for module in (jinja2, markupsafe, toolwise)]
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-c", _BOOT, *folders],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,  # a buffer has a lock, which a fork could not take if another thread held it
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={"LANG": "C.UTF-8", "MALLOC_ARENA_MAX": "1"},
                start_new_session=True,  # an interrupt from the terminal is for the trainer only
            )
            assert self._popen.stdin is not None
            os.set_blocking(self._popen.stdin.fileno(), False)
        return self._popen

    def close(self) -> int | None:
        """End the process, if there is one; returns its exit status."""
        popen, self._popen = self._popen, None
        if popen is None:
            return None
        popen.kill()
        code = popen.wait()
        self._close_pipes(popen)
        return code

    def forget(self) -> None:
        """In a fork: the process belongs to the parent."""
        self._lock = threading.Lock()
        popen, self._popen = self._popen, None
        if popen is not None:
            popen.returncode = 0  # never wait for it here
            self._close_pipes(popen)

    def _close_pipes(self, popen: subprocess.Popen[bytes]) -> None:
        for pipe in (popen.stdin, popen.stdout):
            with suppress(OSError):
                assert pipe is not None
                pipe.close()


def _write(pipe: int, request: bytes, until: float) -> None:
    rest = memoryview(request)
    while rest:
        try:
            rest = rest[os.write(pipe, rest) :]
        except BlockingIOError:
            _wait(pipe, select.POLLOUT, until)


def _read(pipe: int, size: int, until: float) -> bytes:
    parts: list[bytes] = []
    while size:
        _wait(pipe, select.POLLIN, until)
        part = os.read(pipe, min(size, 1 << 20))
        if not part:
            raise _ProcessEndedError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _wait(pipe: int, event: int, until: float) -> None:
    waiting = select.poll()
    waiting.register(pipe, event)
    if not waiting.poll(max(until - time.monotonic(), 0) * 1000):
        raise TemplateLimitError(f"the process that renders it does not answer within {MAX_WAIT_S:g} s")


_process = TemplateProcess()
atexit.register(_process.close)
os.register_at_fork(after_in_child=_process.forget)


def render_template(source: str, variables: Mapping[str, Any], now: datetime) -> str:
    """`TemplateProcess.render`, in the process that all templates share."""
    return _process.render(source, variables, now)
