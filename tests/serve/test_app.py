"""The routes over real HTTP: successes, rejections, and clients that disconnect early."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import httpx
import pytest
import torch

from toolwise.errors import MissingExtraError, PolicyError
from toolwise.models import load_model
from toolwise.policies.local import LocalPolicy
from toolwise.protocols import Generation, Sampling
from toolwise.serve import ServedModel, Server, build_app
from toolwise.serve.app import answer_headers
from toolwise.serve.chat import MAX_REQUEST_BODY_BYTES

torch.set_num_threads(1)
JSON = {"content-type": "application/json"}
HELLO = {"model": "small", "messages": [{"role": "user", "content": "Hello there"}], "temperature": 0}


@cache
def loaded() -> tuple[Any, Any]:
    return load_model("builtin:small", device="cpu")


@pytest.fixture(scope="module")
def root() -> Iterator[str]:
    served = ServedModel.of(LocalPolicy(*loaded(), Sampling(max_new_tokens=16)), "small")
    with Server(build_app(served)) as server:
        yield server.url.removesuffix("/v1")


def post(root: str, body: Any, **more: Any) -> httpx.Response:
    return httpx.post(f"{root}/v1/chat/completions", json=body, timeout=30, **more)


def test_health_and_models(root: str) -> None:
    assert httpx.get(f"{root}/health").json() == {"status": "ok"}
    (model,) = httpx.get(f"{root}/v1/models").json()["data"]
    assert (model["id"], model["object"]) == ("small", "model")


def test_a_completion(root: str) -> None:
    answer = post(root, HELLO | {"logprobs": True, "return_token_ids": True})
    assert answer.status_code == 200
    choice = answer.json()["choices"][0]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) > 0


def test_a_stream_says_the_same(root: str) -> None:
    plain = post(root, HELLO).json()["choices"][0]["message"]["content"]
    streamed = post(root, HELLO | {"stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert "".join(c["delta"].get("content", "") for chunk in chunks for c in chunk["choices"]) == plain
    assert streamed.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 400, None),
        (HELLO | {"n": 0}, 400, None),
        (HELLO | {"min_p": 0.5}, 400, "unsupported_parameter"),
        (HELLO | {"budget": 1}, 400, "unsupported_parameter"),
        (HELLO | {"model": "large"}, 404, "model_not_found"),
        (HELLO | {"max_tokens": 5_000}, 400, "context_length_exceeded"),
    ],
)
def test_a_bad_request_gets_openais_error(root: str, body: Any, status: int, code: str | None) -> None:
    answer = post(root, body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] == code
    assert error["message"]


def test_a_body_that_is_no_json(root: str) -> None:
    answer = httpx.post(f"{root}/v1/chat/completions", content=b"{", headers=JSON)
    assert answer.status_code == 400
    assert "cannot read the JSON body" in answer.json()["error"]["message"]


def test_a_body_too_large_is_not_read_to_its_end(root: str) -> None:
    answer = httpx.post(
        f"{root}/v1/chat/completions", content=b" " * (MAX_REQUEST_BODY_BYTES + 1), headers=JSON, timeout=30
    )
    assert answer.status_code == 413


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/v1/nowhere", 404), ("GET", "/v1/chat/completions", 405)]
)
def test_places_that_are_not_there(root: str, method: str, path: str, status: int) -> None:
    answer = httpx.request(method, f"{root}{path}")
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"


class Fails:
    def __init__(self, fault: Exception) -> None:
        self.fault = fault

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
        raise self.fault


@pytest.mark.parametrize(
    ("fault", "said"), [(PolicyError("the model gives NaN"), "the model gives NaN"), (KeyError("x"), "internal error")]
)
def test_trouble_of_the_servers_own_is_a_500_and_it_goes_on(fault: Exception, said: str) -> None:
    with Server(build_app(ServedModel("small", Fails(fault), loaded()[1], Sampling()))) as server:
        for _ in range(2):
            answer = post(server.url.removesuffix("/v1"), HELLO)
            assert (answer.status_code, answer.json()["error"]["message"]) == (500, said)


class Counts:
    """A model that takes for ever, and knows who waits for it."""

    def __init__(self) -> None:
        self.waiting = 0
        self.given_up = 0

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
        self.waiting += 1
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        raise AssertionError("nobody waits that long")


def test_a_client_who_leaves_frees_its_place() -> None:
    model = Counts()
    with Server(build_app(ServedModel("small", model, loaded()[1], Sampling()))) as server:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/chat/completions", json=HELLO, timeout=httpx.Timeout(5, read=0.5))
        asyncio.run(until(lambda: model.given_up == 1))
    assert model.waiting == 1


async def until(holds: Any) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110  # what is awaited happens in the server's own thread
            await asyncio.sleep(0.01)


def test_without_starlette_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    with pytest.raises(MissingExtraError, match=r"toolwise\[serve\]"):
        build_app(ServedModel("small", Fails(KeyError()), loaded()[1], Sampling()))


class Batches:
    """A local policy that records how many requests ran at once."""

    def __init__(self) -> None:
        self.policy = LocalPolicy(*loaded(), Sampling(max_new_tokens=4))
        self.at_once = self.most = 0

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            return await self.policy.generate(token_ids, sampling)
        finally:
            self.at_once -= 1


def test_requests_that_come_together_are_in_the_generator_together() -> None:
    model = Batches()
    with Server(build_app(ServedModel("small", model, loaded()[1], Sampling(max_new_tokens=4)))) as server:

        async def crowd() -> list[httpx.Response]:
            async with httpx.AsyncClient(timeout=30) as client:
                asked = (client.post(f"{server.url}/chat/completions", json=HELLO) for _ in range(16))
                return await asyncio.gather(*asked)

        answers = asyncio.run(crowd())
    assert {a.status_code for a in answers} == {200}
    assert model.most > 4


def test_the_routes_of_turns_are_readable_in_the_header() -> None:
    assert answer_headers({"usage": {"route": "SEARCH > ANSWER"}}) == {"x-toolwise-route": "SEARCH > ANSWER"}
    assert answer_headers({"usage": {"route": "a\r\nb"}}) == {"x-toolwise-route": "a%0D%0Ab"}
