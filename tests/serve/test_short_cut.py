"""Events that take the short cut over real HTTP: between the first chunk and the last, as chunks of HTTP/1.1."""

from __future__ import annotations

import gc
import json
import socket
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

import httpx

from toolwise.models import load_model
from toolwise.protocols import Generation, Sampling
from toolwise.serve import ServedModel, Server, build_app
from toolwise.serve.completion import event
from toolwise.serve.protocol import LimitedProtocol

HELLO = {"model": "small", "messages": [{"role": "user", "content": "Hello there"}], "stream": True}


@cache
def chat() -> Any:
    return load_model("builtin:small", device="cpu")[1]


class Unused:
    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
        raise AssertionError


def chunk(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}


class TakesIt(ServedModel):
    """Sends what it can by the short cut, which starts with its second word."""

    size = 1

    async def stream(self, request: Any, short_cut: Any = None) -> Any:
        for number, word in enumerate(("one ", "two ", "three ", "four")):
            text = word * self.size
            if number == 2 or not short_cut.write(event(chunk(text)).encode()):
                yield chunk(text if number in (0, 2) else text.upper())  # in capitals: not by the short cut


def app(kind: type[ServedModel] = TakesIt) -> Any:
    return build_app(kind("small", Unused(), chat(), Sampling()))


def ask(port: int, version: str) -> str:
    """The bytes of an answer, as they are sent."""
    body = json.dumps(HELLO).encode()
    head = [f"POST /v1/chat/completions HTTP/{version}", "Host: localhost", "Content-Type: application/json"]
    head += [f"Content-Length: {len(body)}", "Connection: close", "", ""]
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall("\r\n".join(head).encode() + body)
        return b"".join(iter(lambda: client.recv(1 << 20), b"")).decode()


def texts(answer: str) -> list[str]:
    events = [line[6:] for line in answer.splitlines() if line.startswith("data: ") and "[DONE]" not in line]
    return [json.loads(each)["choices"][0]["delta"]["content"] for each in events]


def test_events_keep_their_order() -> None:
    with Server(app()) as server, httpx.Client(timeout=20) as client:
        for _ in range(2):  # the connection is good for another request
            answer = client.post(f"{server.url}/chat/completions", json=HELLO)
            assert texts(answer.text) == ["one ", "two ", "three ", "four"]
            assert answer.text.endswith("data: [DONE]\n\n")


def test_a_client_without_chunks_gets_the_same_events() -> None:
    with Server(app()) as server:
        answer = ask(server.port, "1.0")
    assert texts(answer) == ["one ", "TWO ", "three ", "FOUR"]
    assert answer.partition("\r\n\r\n")[2].startswith("data: ")


class Large(TakesIt):
    size = 2_000_000


def test_a_client_that_does_not_read_is_waited_for() -> None:
    with Server(app(Large)) as server:
        answer = ask(server.port, "1.1")
    # The first chunk fills the buffers, so the short cut is closed for the second.
    assert answer.count("TWO ") == Large.size
    assert answer.count("one ") == answer.count("three ") == Large.size
    assert answer.endswith("0\r\n\r\n")


class Late(TakesIt):
    """Writes to the client of the request before, too."""

    before: ClassVar[list[Any]] = []
    late: ClassVar[list[bool]] = []

    async def stream(self, request: Any, short_cut: Any = None) -> Any:
        yield chunk("first ")
        self.late.extend(old.write(event(chunk("late ")).encode()) for old in self.before)
        self.before.append(short_cut)
        yield chunk("last")


def test_the_short_cut_of_a_request_ends_with_it() -> None:
    with Server(app(Late)) as server, httpx.Client(timeout=20) as client:
        answers = [texts(client.post(f"{server.url}/chat/completions", json=HELLO).text) for _ in range(2)]
    assert answers == [["first ", "last"]] * 2
    assert Late.late == [False]


def test_connections_that_are_closed_leave_nothing_to_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        with Server(app()) as server:
            ask(server.port, "1.1")
        left = [each for each in gc.get_objects() if issubclass(type(each), LimitedProtocol)]
    finally:
        gc.enable()
    assert left == []
