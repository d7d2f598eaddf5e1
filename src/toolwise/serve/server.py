"""A server in a background thread, by default on a free loopback port: for tests, benchmarks and short-lived use."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from toolwise.errors import MissingExtraError, ToolwiseError
from toolwise.serve.app import ServerLimits

if TYPE_CHECKING:
    import uvicorn

START_S = 30.0
GRACE_S = 5.0
"""Time for running requests to finish when the server stops."""


class Server:
    """`with Server(app) as server: …` serves `app` at `server.url`; leaving the block stops it and joins the thread."""

    def __init__(self, app: Any, *, host: str = "127.0.0.1", port: int = 0, limits: ServerLimits | None = None) -> None:
        try:
            import uvicorn

            from toolwise.serve.protocol import limited_protocol
        except ModuleNotFoundError as missing:
            raise MissingExtraError("uvicorn", "serve") from missing
        self.host = host
        self.port = port
        """0 picks a free port, stored here once the server has started."""
        limits = limits or ServerLimits()
        self._server: uvicorn.Server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=limited_protocol(limits),
                ws="none",
                lifespan="off",
                log_level="error",
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=max(1, int(limits.keep_alive_s)),
                timeout_graceful_shutdown=int(GRACE_S),
                h11_max_incomplete_event_size=limits.head_bytes,
            )
        )
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Base URL for an OpenAI client."""
        host = "127.0.0.1" if self.host in ("", "0.0.0.0") else self.host  # the wildcard address is not a target
        return f"http://{host}:{self.port}/v1"

    def start(self) -> Server:
        if self._thread is not None:
            raise ToolwiseError("a server can be started only once: create a new one")
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((self.host, self.port))
        except OSError as fault:
            listening.close()
            raise ToolwiseError(f"cannot listen on {self.host}:{self.port}: {fault.strerror}; try port 0") from fault
        self.port = listening.getsockname()[1]
        self._thread = threading.Thread(target=self._run, args=(listening,), name="toolwise-serve", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + START_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                self.stop()
                raise ToolwiseError(f"the server at {self.url} did not start within {START_S:g} s")
            time.sleep(0.005)
        return self

    def _run(self, listening: socket.socket) -> None:
        with listening:
            self._server.run(sockets=[listening])

    def stop(self) -> None:
        if self._thread is None:
            return
        self._server.should_exit = True
        self._thread.join(GRACE_S + 1.0)
        self._server.force_exit = True
        self._thread.join(GRACE_S)

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *fault: object) -> None:
        self.stop()
