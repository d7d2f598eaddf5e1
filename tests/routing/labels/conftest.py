"""A labelling model on loopback: real HTTP, with errors on demand."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

Reply = tuple[int, bytes, dict[str, str]]


class _Quiet(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Silent: these tests have clients that disconnect."""


class LabellingServer:
    """Answers by `behave(question, times this question was asked)`; counts every request."""

    def __init__(self, behave: Callable[[dict[str, Any], int], Reply]) -> None:
        self.behave = behave
        self.questions: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                question = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with server._lock:
                    times = sum(asked == question for asked in server.questions)
                    server.questions.append(question)
                status, body, headers = server.behave(question, times)
                self.send_response(status)
                for name, value in ({"content-length": str(len(body))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)
                if "content-length" in headers:  # announces more than it sends
                    self.close_connection = True

            def log_message(self, *args: Any) -> None:
                return

        self._http = _Quiet(("127.0.0.1", 0), Handler)
        self.base_url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[dict[str, Any], int], Reply]], LabellingServer]]:
    opened: list[LabellingServer] = []

    def start(behave: Callable[[dict[str, Any], int], Reply]) -> LabellingServer:
        opened.append(LabellingServer(behave))
        return opened[-1]

    yield start
    for server in opened:
        server.close()
