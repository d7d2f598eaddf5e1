"""The gateway's HTTP server: on a free loopback port, in the event loop of the run, started by its first session."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

from toolwise.concurrency.tasks import spawn
from toolwise.errors import ToolwiseError
from toolwise.rollout.agents.recorded_session import RecordedSession, SessionPolicy
from toolwise.serve.gateway.session_app import GATEWAY_LIMITS, SessionTable, build_session_app
from toolwise.serve.limits import TextLimits
from toolwise.serve.server import server_without_signals, uvicorn_config

if TYPE_CHECKING:
    import uvicorn

START_S = 10.0
DRAIN_S = 1.0


class Gateway:
    """Sessions over HTTP. It belongs to one event loop at a time."""

    def __init__(self) -> None:
        self.sessions = SessionTable()
        self._app = build_session_app(self.sessions)
        _make_server(self._app)  # reports a missing package before anything starts
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: uvicorn.Server | None = None
        self._listening: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None
        self._starting: asyncio.Lock | None = None
        self._limits: tuple[SessionPolicy | None, TextLimits | None] = (None, None)

    async def open(self, session: RecordedSession) -> str:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self.close()
            self._loop, self._starting = loop, asyncio.Lock()
        assert self._starting is not None
        async with self._starting:
            if self._serving is None or self._serving.done():
                await self._start()
        assert self._listening is not None
        session.max_prompt_chars = self._text_limits(session).prompt_chars
        self.sessions.add(session)
        return f"http://127.0.0.1:{self._listening.getsockname()[1]}/sessions/{session.session_id}/v1"

    def _text_limits(self, session: RecordedSession) -> TextLimits:
        policy, (of_policy, limits) = session.policy, self._limits
        if limits is None or of_policy is not policy:
            limits = TextLimits.of(policy.chat.tokenizer, policy.max_context)
            self._limits = policy, limits
        return limits

    def end(self, session: RecordedSession) -> None:
        self.sessions.end(session)

    def close(self) -> None:
        """Stop listening; calls in progress end with the event loop."""
        if self._server is not None and self._loop is not None and not self._loop.is_closed():
            for listener in getattr(self._server, "servers", ()):
                listener.close()
        if self._serving is not None and self._loop is not None and not self._loop.is_closed():
            self._serving.cancel()
        if self._listening is not None:
            self._listening.close()
        self._server = self._listening = self._serving = None

    async def _start(self) -> None:
        self._listening = socket.socket()
        self._listening.bind(("127.0.0.1", 0))
        self._server = _make_server(self._app)
        self._serving = spawn(self._server.serve(sockets=[self._listening]))
        until = asyncio.get_running_loop().time() + START_S
        while not self._server.started:
            if self._serving.done() or asyncio.get_running_loop().time() > until:
                raise ToolwiseError(f"the gateway for agents did not start within {START_S:g} s")
            await asyncio.sleep(0.005)


def _make_server(app: Any) -> uvicorn.Server:
    """Leaves Ctrl-C to the run."""
    return server_without_signals(uvicorn_config(app, GATEWAY_LIMITS, drain_s=DRAIN_S))
