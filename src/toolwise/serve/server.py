"""A server in a background thread, by default on a free loopback port: for tests, benchmarks and short-lived use."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from toolwise.errors import MissingExtraError, ToolwiseError
from toolwise.serve.limits import ServerLimits

if TYPE_CHECKING:
    import uvicorn

START_S = 30.0
LISTEN_BACKLOG = 2048
GRACE_S = 5.0
"""Time for running requests to finish when the server stops."""


def uvicorn_config(app: Any, limits: ServerLimits, *, drain_s: float) -> uvicorn.Config:
    try:
        import uvicorn

        from toolwise.serve.protocol import limited_protocol
    except ModuleNotFoundError as missing:
        raise MissingExtraError("uvicorn", "serve") from missing
    return uvicorn.Config(
        app,
        http=limited_protocol(limits),
        ws="none",
        lifespan="off",
        log_level="error",
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=max(1, int(limits.keep_alive_s)),
        timeout_graceful_shutdown=max(1, int(drain_s)),
        h11_max_incomplete_event_size=limits.head_bytes,
        backlog=LISTEN_BACKLOG,
    )


def server_without_signals(config: uvicorn.Config) -> uvicorn.Server:
    """A server that leaves signals to its caller; uvicorn would take them over, and raise them again in the end."""
    import uvicorn

    class ServerWithoutSignals(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return ServerWithoutSignals(config)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 picks a free one."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)[0]
    except OSError as fault:
        raise ToolwiseError(f"there is no address {host}: {fault.strerror}") from fault
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
    except OSError as fault:
        listening.close()
        raise ToolwiseError(f"cannot listen on {host}:{port}: {fault.strerror}; try port 0") from fault
    return listening


class Server:
    """`with Server(app) as server: …` serves `app` at `server.url`; leaving the block stops it and joins the thread."""

    def __init__(self, app: Any, *, host: str = "127.0.0.1", port: int = 0, limits: ServerLimits | None = None) -> None:
        self.host = host
        self.port = port
        """0 picks a free port, stored here once the server has started."""
        config = uvicorn_config(app, limits or ServerLimits(), drain_s=GRACE_S)
        import uvicorn

        self._server: uvicorn.Server = uvicorn.Server(config)
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Base URL for an OpenAI client."""
        host = "127.0.0.1" if self.host in ("", "0.0.0.0") else self.host  # the wildcard address is not a target
        return f"http://{host}:{self.port}/v1"

    def start(self) -> Server:
        if self._thread is not None:
            raise ToolwiseError("a server can be started only once: create a new one")
        listening = listen(self.host, self.port)
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
