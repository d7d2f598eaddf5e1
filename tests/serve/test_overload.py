"""A server with little room: 429, deadlines and clients that leave, over real HTTP, streamed or not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import httpx
import pytest

from toolwise.models import load_model
from toolwise.protocols import Generation, Sampling
from toolwise.serve import ServedModel, Server, ServerLimits, build_app
from toolwise.serve.admission import Admission

HELLO = {"model": "small", "messages": [{"role": "user", "content": "Hello there"}]}


@cache
def chat() -> Any:
    return load_model("builtin:small", device="cpu")[1]


class Never:
    """A model that never answers."""

    started = cancelled = 0

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
        self.started += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        raise AssertionError


class Fails:
    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
        raise KeyError("/secret/path")


def serve(model: Any, **limits: Any) -> tuple[Server, Admission]:
    bounds = ServerLimits(**limits)
    admission = Admission(bounds)
    app = build_app(ServedModel("small", model, chat(), Sampling()), limits=bounds, admission=admission)
    return Server(app, limits=bounds), admission


async def until(holds: Any) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110  # what is awaited happens in the server's own thread
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_a_429_and_those_who_leave_make_room(stream: bool) -> None:
    model = Never()
    server, admission = serve(model, active=1, queued=1)

    async def play(url: str) -> None:
        async with httpx.AsyncClient(timeout=20) as client:

            def ask() -> Any:
                return client.post(url, json=HELLO | {"stream": stream})

            held = [asyncio.create_task(ask()) for _ in range(2)]
            await until(lambda: (admission.active, admission.waiting, model.started) == (1, 1, 1))
            refused = await ask()
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert int(refused.headers["retry-after"]) >= 1
            for task in held:
                task.cancel()
            await asyncio.gather(*held, return_exceptions=True)
            await until(lambda: (admission.active, admission.waiting) == (0, 0))

    with server:
        asyncio.run(play(f"{server.url}/chat/completions"))
    assert model.cancelled >= 1


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long_is_a_504(stream: bool) -> None:
    model = Never()
    server, admission = serve(model, deadline_s=0.2)
    with server:
        answer = httpx.post(f"{server.url}/chat/completions", json=HELLO | {"stream": stream}, timeout=20)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert (admission.active, model.cancelled) == (0, 1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_of_the_server_says_nothing_of_itself(stream: bool) -> None:
    server, _ = serve(Fails())
    with server:
        answer = httpx.post(f"{server.url}/chat/completions", json=HELLO | {"stream": stream}, timeout=20)
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "internal error")
    assert "secret" not in answer.text


class FailsLater(ServedModel):
    """Breaks in the middle of a stream."""

    async def stream(self, request: Any, short_cut: Any = None) -> Any:
        yield {"choices": [{"index": 0, "delta": {"content": "so far"}, "finish_reason": None}]}
        raise KeyError("/secret/path")


def test_a_fault_in_a_stream_is_its_last_event() -> None:
    app = build_app(FailsLater("small", Never(), chat(), Sampling()))
    with Server(app) as server:
        answer = httpx.post(f"{server.url}/chat/completions", json=HELLO | {"stream": True}, timeout=20)
    first, last = [json.loads(line[6:]) for line in answer.text.splitlines() if line]
    assert (answer.status_code, first["choices"][0]["delta"]["content"]) == (200, "so far")
    assert last["error"]["message"] == "internal error"
    assert "secret" not in answer.text
    assert "[DONE]" not in answer.text
