"""A server in a thread: starts on a free port, stops cleanly, and leaves nothing behind."""

from __future__ import annotations

import socket
import sys
import threading
import time
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from toolwise.errors import MissingExtraError, ToolwiseError
from toolwise.serve.server import Server


def app() -> Any:
    async def hello(request: Request) -> Response:
        return PlainTextResponse("hello")

    return Starlette(routes=[Route("/v1/hello", hello)])


def test_it_serves_while_inside_and_not_after() -> None:
    with Server(app()) as server:
        assert httpx.get(f"{server.url}/hello").text == "hello"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/hello")
    assert "toolwise-serve" not in {thread.name for thread in threading.enumerate()}


def test_several_have_ports_of_their_own() -> None:
    with Server(app()) as one, Server(app()) as two:
        assert one.port != two.port
        assert httpx.get(f"{one.url}/hello").text == httpx.get(f"{two.url}/hello").text


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ToolwiseError, match=f"cannot listen on 127.0.0.1:{port}"):
            Server(app(), port=port).start()


def test_stopping_twice_or_before_the_start_does_no_harm() -> None:
    server = Server(app())
    server.stop()
    server.start()
    server.stop()
    server.stop()
    with pytest.raises(ToolwiseError, match="only once"):
        server.start()


def test_an_open_connection_does_not_hold_up_the_end() -> None:
    with Server(app()) as server, httpx.Client() as client:
        client.get(f"{server.url}/hello")
        began = time.monotonic()
        server.stop()
        assert time.monotonic() - began < 5


def test_without_uvicorn_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(MissingExtraError, match=r"toolwise\[serve\]"):
        Server(app())
