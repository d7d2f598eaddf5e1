"""The gateway's ASGI app: the routes of each session, guarded by the session's own key.

POST /sessions/ID/v1/chat/completions       one recorded call, plain or as a stream
GET  /sessions/ID/v1/models
POST /sessions/ID/inference/v1/generate     token ids in and out, as in vLLM
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from toolwise.concurrency.deadlines import count_abandoned
from toolwise.concurrency.text_threads import run_if_long
from toolwise.errors import MissingExtraError, ModelError, TemplateLimitError, ToolwiseError
from toolwise.rollout.agents.recorded_session import (
    ContextLimitError,
    RecordedSession,
    SessionEndedError,
    SessionLimitError,
)
from toolwise.serve.event_stream import EventStream
from toolwise.serve.gateway.call_stream import stream_call
from toolwise.serve.gateway.wire_format import (
    ChatCall,
    GenerateCall,
    chat_answer,
    check_vocabulary,
    generate_answer,
    read_chat_call,
    read_generate_call,
    token_texts,
)
from toolwise.serve.guard import LOOPBACK, ApiKeys, BodyReader, RequestGuard
from toolwise.serve.limits import ServerLimits
from toolwise.serve.request import BadRequestError, error_body

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

log = logging.getLogger("toolwise.serve")
Call = TypeVar("Call")
MODEL = "toolwise"
"""The name of the model; clients may use any other."""
MAX_BODY_BYTES = 32_000_000
MAX_REMEMBERED = 10_000
"""Ended sessions whose late calls are told from calls of no session."""
MAX_MESSAGE_CHARS = 1_000
GATEWAY_LIMITS = ServerLimits(connections=4096, head_s=300.0, keep_alive_s=300.0)
"""A connection may wait as long as an agent's tools take."""


class SessionTable:
    """The open sessions by id, and the latest of those that have ended."""

    def __init__(self) -> None:
        self._open: dict[str, RecordedSession] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        self.late_calls = 0
        """Calls that came after the end of their session."""

    def add(self, session: RecordedSession) -> None:
        self._open[session.session_id] = session

    def end(self, session: RecordedSession) -> None:
        if self._open.pop(session.session_id, None) is not None:
            self._ended[session.session_id] = session.api_key
            while len(self._ended) > MAX_REMEMBERED:
                self._ended.popitem(last=False)

    def find(self, session_id: str, authorization: str) -> RecordedSession:
        """The session; raises `BadRequestError` if there is none or the key is another's."""
        session = self._open.get(session_id)
        expected = self._ended.get(session_id) if session is None else session.api_key
        if expected is None:
            raise BadRequestError("there is no such session", code="session_not_found", status=404)
        if not secrets.compare_digest(authorization.encode(), f"Bearer {expected}".encode()):
            raise BadRequestError("the API key is not that of this session", code="invalid_api_key", status=401)
        if session is None:
            self.late_calls += 1
            count_abandoned("a call of an agent", "came after the end of its session")
            raise SessionEndedError("this session has ended: its agent must not call the model any more")
        return session


def build_session_app(sessions: SessionTable) -> Starlette:
    try:
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.middleware import Middleware
        from starlette.requests import ClientDisconnect
        from starlette.responses import JSONResponse, Response
        from starlette.routing import Route
    except ModuleNotFoundError as missing:
        raise MissingExtraError("starlette", "serve") from missing

    limits = GATEWAY_LIMITS
    bodies = BodyReader(MAX_BODY_BYTES, limits.body_s)

    async def models(call: None, session: RecordedSession) -> Response:
        policy = session.policy
        card = {"id": MODEL, "object": "model", "created": 0, "owned_by": "toolwise"}
        more = {"max_model_len": policy.max_context, "root": policy.chat.name}  # as vLLM has them
        return JSONResponse({"object": "list", "data": [card | more]})

    async def chat_completions(call: ChatCall, session: RecordedSession) -> Response:
        if call.stream:
            return EventStream(stream_call(call, session, call.model or MODEL), refuse)  # type: ignore[return-value]
        recorded = await session.complete(call.messages, call.specs or None, call.options)
        texts = token_texts(call, recorded, session.policy.chat)
        return JSONResponse(chat_answer(call, recorded, call.model or MODEL, texts))

    async def generate(call: GenerateCall, session: RecordedSession) -> Response:
        check_vocabulary(call, len(session.policy.chat.tokenizer))
        return JSONResponse(generate_answer(await session.generate(call.token_ids, call.options)))

    def guarded(
        parse: Callable[[bytes], Call], handle: Callable[[Call, RecordedSession], Coroutine[Any, Any, Response]]
    ) -> Any:
        async def endpoint(request: Request) -> Response:
            try:
                session = sessions.find(request.path_params["session_id"], request.headers.get("authorization", ""))
                async with bodies.read(request) as raw:
                    call = await run_if_long(len(raw), parse, raw)
                del raw  # a call that waits for the model holds no body
                answer = await _until_disconnected(request, handle(call, session))
                return Response(status_code=499) if answer is None else answer
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as fault:
                return refuse(fault)

        return endpoint

    def refuse(fault: Exception) -> Response:
        status, body = session_error(fault)
        closes = isinstance(fault, BadRequestError) and fault.close_connection
        return JSONResponse(body, status_code=status, headers={"connection": "close"} if closes else None)

    async def http_error(request: Request, fault: Exception) -> Response:
        assert isinstance(fault, HTTPException)
        return JSONResponse(error_body(str(fault.detail)), status_code=fault.status_code, headers=fault.headers)

    root = "/sessions/{session_id}"
    return Starlette(
        routes=[
            Route(f"{root}/v1/models", guarded(lambda raw: None, models)),
            Route(f"{root}/v1/chat/completions", guarded(read_chat_call, chat_completions), methods=["POST"]),
            Route(f"{root}/inference/v1/generate", guarded(read_generate_call, generate), methods=["POST"]),
        ],
        middleware=[Middleware(RequestGuard, refuse=refuse, hosts=frozenset(LOOPBACK), limits=limits, keys=ApiKeys())],
        exception_handlers={HTTPException: http_error},
    )


def session_error(fault: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body in the OpenAI error format. 4xx where a retry is pointless: clients retry a 5xx by themselves."""
    message = " ".join(str(fault).split())[:MAX_MESSAGE_CHARS]
    if isinstance(fault, BadRequestError):
        return fault.status, error_body(message, param=fault.param, code=fault.code)
    if isinstance(fault, SessionEndedError):
        return 410, error_body(message, code="session_ended")
    if isinstance(fault, SessionLimitError):
        full = "context_length_exceeded" if isinstance(fault, ContextLimitError) else fault.reason.value
        return 400, error_body(message, param="messages", code=full)
    if isinstance(fault, ModelError | TemplateLimitError):  # the chat template refuses the messages
        return 400, error_body(message, param="messages")
    log.error("%s: %s", type(fault).__name__, fault, exc_info=None if isinstance(fault, ToolwiseError) else fault)
    return 500, error_body(message if isinstance(fault, ToolwiseError) else "internal error", "server_error")


async def _until_disconnected(request: Request, work: Coroutine[Any, Any, Response]) -> Response | None:
    """The result of `work`; None if the client disconnects first, so that a call that nobody reads is not recorded."""
    answer = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            if answer.cancelled():  # the session has ended meanwhile
                raise SessionEndedError("this session has ended")
            return answer.result()
        return None
    finally:
        for task in (answer, gone):
            task.cancel()
        await asyncio.gather(answer, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue
