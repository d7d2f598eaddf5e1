"""uvicorn's h11 protocol with a timeout for every wait on a client, a limit on connections, and a short way for the
events of a stream."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from toolwise.serve.event_stream import WRITE
from toolwise.serve.limits import ServerLimits
from toolwise.serve.request import INVALID_REQUEST, error_body


def limited_protocol(limits: ServerLimits) -> type[H11Protocol]:
    """The protocol class for uvicorn, which creates one instance per connection."""
    return type("BoundLimitedProtocol", (LimitedProtocol,), {"limits": limits})


async def _run_app(app: Any, scope: Any, receive: Any, send: Any) -> None:
    """Call `app`, with the short way where parts of a body are chunks."""
    extensions = {WRITE: partial(_write_part, send.__self__)} if scope["http_version"] == "1.1" else {}
    scope["extensions"] = extensions
    try:
        await app(scope, receive, send)
    finally:
        extensions.clear()  # of a request that has ended, nothing waits for the garbage collector


def _write_part(cycle: Any, data: bytes) -> bool:
    """What a request's `send` does for a part of a body, without h11's part in it, which is most of the time."""
    if cycle.flow.write_paused or cycle.disconnected or cycle.response_complete or not cycle.response_started:
        return False
    if data:  # a chunk of nothing would end the body
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
    return True


class LimitedProtocol(H11Protocol):
    """A deadline for each phase of a connection: head, body, draining a rejected body, closing. Generating a response
    has none: how long the model takes is not up to the client."""

    limits = ServerLimits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._phase: tuple[str, int] = ("", 0)
        self._deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None
        self._refused = False
        self.app = partial(_run_app, self.config.loaded_app)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            self._refused = True
            self._refuse(503, "too many connections", "server_error", ("retry-after", "1"))
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._deadline, self._write_deadline):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused or self.transport.is_closing():
            return
        super().data_received(data)
        self._set_deadline()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._set_deadline()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._set_deadline()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_deadline is None:
            self._write_deadline = self.loop.call_later(self.limits.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Called for input that is not HTTP or has too large a head."""
        self._refuse(400, msg)

    def _set_deadline(self) -> None:
        """Set the deadline of the current phase, unless it is already running."""
        name = self._phase_name()
        if (name, id(self.cycle)) == self._phase:
            return
        self._phase = (name, id(self.cycle))
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        seconds = {
            "head": self.limits.head_s,
            "body": self.limits.body_s + self.limits.drain_s,  # the application answers with 408 after body_s
            "drain": self.limits.drain_s,
            "closing": self.limits.write_s,
        }.get(name)
        if seconds is not None:
            self._deadline = self.loop.call_later(seconds, self._expire, name)

    def _phase_name(self) -> str:
        if self.transport.is_closing():
            return "closing"
        answering = self.cycle is not None and not self.cycle.response_complete
        if self.conn.their_state is h11.SEND_BODY:
            return "body" if answering else "drain"
        return "answer" if answering else "head"

    def _expire(self, phase: str) -> None:
        if phase == "head" and self.conn.trailing_data[0]:
            self._refuse(408, f"the headers did not arrive within {self.limits.head_s:g} s")
        else:
            self.transport.abort()

    def _refuse(self, status: int, message: str, kind: str = INVALID_REQUEST, *more_headers: tuple[str, str]) -> None:
        if self.cycle is not None:  # cancel the running request: the client will not read its response
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = json.dumps(error_body(message, kind)).encode()
        head = h11.Response(
            status_code=status,
            headers=[
                ("content-type", "application/json"),
                ("connection", "close"),
                ("content-length", str(len(body))),
                *more_headers,
            ],
            reason=HTTPStatus(status).phrase.encode(),
        )
        try:
            answer = b"".join(self.conn.send(event) or b"" for event in (head, h11.Data(data=body), h11.EndOfMessage()))
        except h11.LocalProtocolError:  # a response has already started
            self.transport.abort()
            return
        self.transport.write(answer)
        self.transport.close()
        self._set_deadline()
