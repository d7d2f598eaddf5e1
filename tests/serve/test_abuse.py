"""Hostile HTTP over real sockets: each case is rejected quickly, and the next request is answered."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from raw_http import HELLO, Echo, read_answer, request, say

from toolwise.models import load_model
from toolwise.protocols import Generation, Sampling
from toolwise.serve import ServedModel, Server, ServerLimits, build_app

BODY = json.dumps(HELLO).encode()
SHORT = ServerLimits(
    connections=8, head_s=0.6, body_s=0.6, write_s=0.6, keep_alive_s=1.0, drain_s=0.6, head_bytes=8192, headers=40
)


@cache
def chat() -> Any:
    return load_model("builtin:small", device="cpu")[1]


class Troubles(logging.Handler):
    """What the server logs as its own fault: nothing that a client sends may be."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(f"{record.getMessage()} {record.exc_info}")


@pytest.fixture(autouse=True)
def troubles() -> Iterator[None]:
    handler = Troubles()
    loggers = [logging.getLogger(name) for name in ("uvicorn.error", "toolwise.serve", "asyncio")]
    for logger in loggers:
        logger.addHandler(handler)
    yield
    time.sleep(0.01)  # for what follows an answer
    for logger in loggers:
        logger.removeHandler(handler)
    assert handler.seen == []


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    served = ServedModel("small", Echo(), chat(), Sampling(max_new_tokens=4), max_context=4096)
    limits = ServerLimits(head_bytes=8192, headers=40)
    with Server(build_app(served, limits=limits), limits=limits) as server:
        yield server.port
        assert say(server.port, request(BODY)).status == 200


@pytest.fixture(scope="module")
def hasty() -> Iterator[int]:
    """The same with deadlines of half a second and eight connections."""
    served = ServedModel("small", Echo(), chat(), Sampling(max_new_tokens=4), max_context=4096)
    with Server(build_app(served, limits=SHORT), limits=SHORT) as server:
        yield server.port


def test_what_is_well_said_is_answered(port: int) -> None:
    assert say(port, request(BODY)).status == 200
    assert say(port, *[bytes([byte]) for byte in request(BODY)]).status == 200


HOST, JSON, CHUNKED = "Host: localhost", "Content-Type: application/json", "Transfer-Encoding: chunked"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
SIZE = f"Content-Length: {len(BODY)}"
HEALTH = request(method="GET", target="/health", headers=[HOST], length=False)


def raw(*headers: str, body: bytes = BODY) -> bytes:
    return request(body, headers=[HOST, JSON, *headers], length=False)


FRAMING = {
    "CL and TE": (raw(SIZE, CHUNKED, body=CHUNKS), 400),
    "TE and CL": (raw(CHUNKED, SIZE, body=CHUNKS), 400),
    "CL.TE smuggling": (raw("Content-Length: 6", CHUNKED, body=b"0\r\n\r\nG"), 400),
    "TE.CL smuggling": (raw("Content-Length: 4", CHUNKED, body=b"5c\r\nGET /x HTTP/1.1\r\n\r\n0\r\n\r\n"), 400),
    "two lengths that differ": (raw(SIZE, "Content-Length: 1"), 400),
    "a list of lengths that differ": (raw(f"{SIZE}, 1"), 400),
    "a negative length": (raw("Content-Length: -1"), 400),
    "a signed length": (raw(f"Content-Length: +{len(BODY)}"), 400),
    "a hexadecimal length": (raw("Content-Length: 0x10"), 400),
    "a length with an underscore": (raw("Content-Length: 1_0"), 400),
    "a length of 5,000 digits": (raw("Content-Length: " + "9" * 5000), 400),
    "an empty length": (raw("Content-Length:"), 400),
    "a length with a space before the colon": (raw(f"Content-Length : {len(BODY)}"), 400),
    "TE identity": (raw("Transfer-Encoding: identity"), 400),
    "TE gzip, chunked": (raw("Transfer-Encoding: gzip, chunked", body=CHUNKS), 400),
    "TE chunked twice": (raw(CHUNKED, CHUNKED, body=CHUNKS), 400),
    "TE xchunked": (raw("Transfer-Encoding: xchunked", body=CHUNKS), 400),
    "TE with a vertical tab": (raw("Transfer-Encoding: \x0bchunked", body=CHUNKS), 400),
    "TE with a space before the colon": (raw("Transfer-Encoding : chunked", body=CHUNKS), 400),
    "TE in HTTP/1.0": (raw(CHUNKED, body=CHUNKS).replace(b"HTTP/1.1", b"HTTP/1.0", 1), 400),
    "a chunk size that is none": (raw(CHUNKED, body=b"zz\r\n{}\r\n0\r\n\r\n"), 400),
    "a bad chunk after headers that are refused": (
        request(b"zz\r\n{}\r\n", headers=[HOST, "Content-Type: text/plain", CHUNKED], length=False),
        400,
    ),
    "a negative chunk size": (raw(CHUNKED, body=b"-1\r\n{}\r\n0\r\n\r\n"), 400),
    "a chunk size of 30 digits": (raw(CHUNKED, body=b"f" * 30 + b"\r\n{}"), 400),
    "a chunk longer than its size": (raw(CHUNKED, body=b"1\r\n{}\r\n0\r\n\r\n"), 400),
    "chunk extensions without end": (raw(CHUNKED, body=b"1;" + b"a" * 20_000), 400),
    "trailers without end": (raw(CHUNKED, body=b"0\r\n" + b"a: b\r\n" * 5_000), 400),
    "no host": (request(BODY, headers=[JSON]), 400),
    "two hosts": (request(BODY, headers=[HOST, "Host: localhost", JSON]), 400),
    "an empty host": (request(BODY, headers=["Host:", JSON]), 400),
    "a host with a path": (request(BODY, headers=["Host: localhost/x", JSON]), 400),
    "a host with a user": (request(BODY, headers=["Host: localhost@evil", JSON]), 400),
    "HTTP/1.0 without a host": (b"GET /health HTTP/1.0\r\n\r\n", 400),
    "HTTP/9.9": (b"GET /health HTTP/9.9\r\nHost: localhost\r\n\r\n", 505),
    "HTTP/2's preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "no version": (b"GET /health\r\n\r\n", 400),
    "TLS": (bytes.fromhex("16030100c8010000c40303") + b"\x01" * 190, 400),
    "zero bytes": (b"\x00" * 100 + b"\r\n\r\n", 400),
    "a header without a colon": (request(BODY, headers=[HOST, JSON, "nonsense"]), 400),
    "a header with a zero byte": (request(BODY, headers=[HOST, JSON, "a: b\x00c"]), 400),
    "a header with a bare CR": (request(BODY, headers=[HOST, JSON, "a: b\rTransfer-Encoding: chunked"]), 400),
    "a header name with a space": (request(BODY, headers=[HOST, JSON, "a b: c"]), 400),
    "a first header that is folded": (request(BODY, headers=[" folded: x", HOST, JSON]), 400),
    "41 headers": (request(BODY, headers=[HOST, JSON, *(f"a{i}: b" for i in range(39))]), 431),
    "8 KB in one header": (request(BODY, headers=[HOST, JSON, "a: " + "b" * 8_192]), 431),
    "300 KB in one header": (request(BODY, headers=[HOST, JSON, "a: " + "b" * 300_000]), 400),
    "a target of 9 KB": (request(method="GET", target="/" + "a" * 9_000, headers=[HOST]), 431),
    "a target of 300 KB": (request(method="GET", target="/" + "a" * 300_000, headers=[HOST]), 400),
}


@pytest.mark.parametrize(("sent", "status"), FRAMING.values(), ids=FRAMING)
def test_framing_that_is_wrong_or_in_doubt_ends_the_connection(port: int, sent: bytes, status: int) -> None:
    answer = say(port, sent)
    assert answer.status == status
    assert answer.closed
    assert answer.error["message"]
    assert answer.seconds < 2
    assert b"HTTP/1.1 " not in answer.body  # one answer: nothing after it was taken for a request


@pytest.mark.parametrize(
    "sent",
    [
        raw(SIZE, SIZE),
        raw(f"Content-Length: {len(BODY)}, {len(BODY)}"),
        request(BODY, headers=[HOST, JSON, "X-Note: one\r\n two"]),
        request(BODY, headers=[HOST, "Content-Type:\r\n application/json"]),
        raw(CHUNKED, body=CHUNKS),
        raw("TRANSFER-ENCODING: Chunked", body=CHUNKS),
    ],
    ids=["the length twice", "the length twice in a list", "a fold", "a folded type", "chunks", "CHUNKS"],
)
def test_what_http_lets_a_server_make_good_has_one_meaning(port: int, sent: bytes) -> None:
    """The next request on the connection begins where this one ends."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(sent)
        assert read_answer(connection).status == 200
        connection.sendall(HEALTH)
        assert json.loads(read_answer(connection).body) == {"status": "ok"}


HEADERS = {
    "no type": ([HOST], 415),
    "text/plain": ([HOST, "Content-Type: text/plain"], 415),
    "a form": ([HOST, "Content-Type: application/x-www-form-urlencoded"], 415),
    "a multipart form": ([HOST, "Content-Type: multipart/form-data; boundary=x"], 415),
    "two types": ([HOST, JSON, "Content-Type: text/plain"], 415),
    "JSON hidden in a parameter": ([HOST, "Content-Type: text/plain; a=application/json"], 415),
    "another charset": ([HOST, "Content-Type: application/json; charset=utf-16"], 415),
    "compressed": ([HOST, JSON, "Content-Encoding: gzip"], 415),
    "a strange host": (["Host: evil.example", JSON], 403),
    "a strange host that begins well": (["Host: localhost.evil.example", JSON], 403),
    "a strange host that ends well": (["Host: evil.localhost", JSON], 403),
    "another machine's address": (["Host: 10.0.0.1:8000", JSON], 403),
    "a whole address in one number": (["Host: 2130706433", JSON], 403),
    "all addresses": (["Host: 0.0.0.0", JSON], 403),
    "localhost with a port": (["Host: localhost:8000", JSON], 200),
    "LOCALHOST": (["Host: LOCALHOST", JSON], 200),
    "127.0.0.1 with a port": (["Host: 127.0.0.1:1", JSON], 200),
    "[::1] with a port": (["Host: [::1]:8000", JSON], 200),
    "JSON in UTF-8": ([HOST, 'Content-Type: Application/JSON ; charset="UTF-8"'], 200),
}


@pytest.mark.parametrize(("headers", "status"), HEADERS.values(), ids=HEADERS)
def test_host_and_content_type(port: int, headers: list[str], status: int) -> None:
    answer = say(port, request(BODY, headers=headers))
    assert answer.status == status
    assert status == 200 or answer.error["type"] == "invalid_request_error"


def test_hosts_of_ones_own_are_added() -> None:
    served = ServedModel("small", Echo(), chat(), Sampling(), max_context=4096)
    for hosts, status in (["models.example"], 200), (["*"], 200), ([], 403):
        with Server(build_app(served, hosts=hosts)) as server:
            assert say(server.port, request(BODY, headers=["Host: Models.Example:80", JSON])).status == status


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def tool(name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


USER = {"role": "user", "content": "x"}
HALF = "\\u" + "d800"
VALUES: dict[str, str] = {
    "temperature −1": '"temperature": -1',
    "temperature 1e308": '"temperature": 1e308',
    "temperature 1e-40": '"temperature": 1e-40',
    "temperature 1e999": '"temperature": 1e999',
    "temperature NaN": '"temperature": NaN',
    "temperature −Infinity": '"temperature": -Infinity',
    "temperature in words": '"temperature": "0.5"',
    "temperature true": '"temperature": true',
    "temperature in a list": '"temperature": [1]',
    "temperature in an object": '"temperature": {"a": 1}',
    "top_p 2": '"top_p": 2',
    "top_p −1": '"top_p": -1',
    "top_k 10^9": '"top_k": 1000000000',
    "max_tokens −5": '"max_tokens": -5',
    "max_tokens 0": '"max_tokens": 0',
    "max_tokens 10^12": '"max_tokens": 1000000000000',
    "max_tokens 1e12": '"max_tokens": 1e12',
    "max_tokens 1.5": '"max_tokens": 1.5',
    "max_tokens in words": '"max_tokens": "10"',
    "max_tokens of 5,000 digits": '"max_tokens": ' + "9" * 5_000,
    "max_completion_tokens 2^63": f'"max_completion_tokens": {2**63}',
    "seed 2^70": f'"seed": {2**70}',
    "seed 0.5": '"seed": 0.5',
    "n 0": '"n": 0',
    "n 10^6": '"n": 1000000',
    "n true": '"n": true',
    "10^5 stops": '"stop": ' + json.dumps(["x"] * 100_000),
    "10^5 stop ids": '"stop_token_ids": ' + json.dumps([1] * 100_000),
    "a negative stop id": '"stop_token_ids": [-1]',
    "a stop id of 2^40": f'"stop_token_ids": [{2**40}]',
    "10^5 biases": '"logit_bias": ' + json.dumps({str(i): 100 for i in range(100_000)}),
    "300,000 values": '"user": [' + ",".join("1" * 300_000) + "]",
    "10^5 nested lists": '"user": ' + nested(100_000),
    "65 nested lists": '"user": ' + nested(65),
    "nested metadata": '"metadata": ' + '{"a":' * 500 + "1" + "}" * 500,
    "tools 200 deep": '"tools": ' + json.dumps([tool(parameters={"a": json.loads(nested(200))})]),
    "1,001 tools": '"tools": ' + json.dumps([tool()] * 1_001),
    "tools of another type": '"tools": [{"type": "code"}]',
    "tools in a string": '"tools": "all"',
    "a tool without a name": '"tools": [{"type": "function", "function": {}}]',
    "20,001 messages": '"messages": ' + json.dumps([USER] * 20_001),
    "no messages": '"messages": []',
    "messages in a string": '"messages": "hello"',
    "a message without a role": '"messages": [{"content": "x"}]',
    "a message of another role": '"messages": [{"role": "root", "content": "x"}]',
    "content in an object": '"messages": [{"role": "user", "content": {"a": 1}}]',
    "half a character": '"messages": [{"role": "user", "content": "' + HALF + '"}]',
    "stream in words": '"stream": "yes"',
    "a model's name of 10 KB": '"model": "' + "m" * 10_000 + '"',
    "infinity in a tool": '"tools": [{"function": {"name": "f", "parameters": {"maximum": 1e999}}}]',
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_absurd_values_get_openais_error(port: int, value: str) -> None:
    name = value.partition(":")[0].strip('"')
    fields = {key: json.dumps(given) for key, given in HELLO.items() if key != name}
    body = "{" + ", ".join([*(f'"{key}": {given}' for key, given in fields.items()), value]) + "}"
    answer = say(port, request(body.encode()))
    assert answer.status == 400
    error = answer.error
    assert error["type"] == "invalid_request_error"
    assert "\n" not in error["message"]
    assert len(error["message"]) <= 1_000
    assert answer.seconds < 2


BODIES = {
    "nothing": b"",
    "a brace": b"{",
    "a list": b"[]",
    "a number": b"1",
    "UTF-16": BODY.decode().encode("utf-16"),
    "broken UTF-8": b'{"model": "\xff"}',
    "a byte order mark": b"\xef\xbb\xbf" + BODY,
    "two objects": BODY + BODY,
    "an open string of escaped quotes": b'"' + b'\\"' * 400_000,
    "a backslash at the end": b'{"model": "small\\',
    "800 KB of open brackets": b"[" * 800_000,
    "800 KB of quotes": b'"' * 800_000,
    "800 KB of commas": b"[" + b"," * 800_000,
    "control characters": b'{"model": "\x00\x01"}',
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_bodies_that_are_no_request(port: int, body: bytes) -> None:
    answer = say(port, request(body))
    assert answer.status == 400
    assert answer.error["message"].startswith(("cannot read the JSON body", "the body must be"))
    assert answer.seconds < 2


def test_a_long_text_is_refused_before_it_is_tokenised(port: int) -> None:
    body = json.dumps({"model": "small", "messages": [{"role": "user", "content": "word " * 60_000}]}).encode()
    answer = say(port, request(body))
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert "characters cannot fit the model's 4096 tokens" in answer.error["message"]
    assert answer.seconds < 1


def test_what_just_fits_is_not_refused_for_its_length(port: int) -> None:
    """The longest token of the vocabulary, over and over, in the wordiest spelling that JSON has."""
    text = " straightforward" * 4_000
    spelled = "".join(f"\\u{ord(c):04x}" for c in text)
    body = '{"model": "small", "messages": [{"role": "user", "content": "' + spelled + '"}]}'
    answer = say(port, request(body.encode()))
    assert answer.status == 200
    assert 4_000 <= json.loads(answer.body)["usage"]["prompt_tokens"] < 4_096


@pytest.mark.parametrize("chunked", [False, True])
def test_a_refused_body_is_not_awaited(port: int, chunked: bool) -> None:
    head = raw(CHUNKED, body=b"") if chunked else raw("Content-Length: 40000000", body=b"")
    piece = b"%x\r\n%s\r\n" % (1_000_000, b"a" * 1_000_000) if chunked else b"a" * 1_000_000
    answer = say(port, head, *[piece] * 40)
    assert answer.status == 413
    assert answer.seconds < 2


def test_a_client_that_waits_to_be_told_to_go_on_is_refused_at_once(port: int) -> None:
    answer = say(port, raw("Content-Length: 40000000", "Expect: 100-continue", body=b""))
    assert answer.status == 413
    assert answer.seconds < 1


def seconds_open(connection: socket.socket, at_most: float) -> float:
    """How long the server keeps the connection while one byte is sent every 50 ms."""
    began = time.monotonic()
    connection.settimeout(0.05)
    while time.monotonic() - began < at_most:
        try:
            connection.sendall(b"a")
            if not connection.recv(65536):
                break
        except TimeoutError:
            continue
        except OSError:
            break
    return time.monotonic() - began


DRIPS = {
    "nothing": b"",
    "a request line": b"GET /health HTTP/1.1\r\n",
    "headers": b"GET /health HTTP/1.1\r\nHost: localhost\r\na: ",
    "a body": raw("Content-Length: 10000", body=b'{"a'),
    "a chunk": raw(CHUNKED, body=b"ffff\r\n{"),
    "a body that nobody asked for": request(
        method="GET", target="/health", headers=[HOST, "Content-Length: 9999"], length=False
    ),
    "a refused body": raw("Content-Length: 99999999", body=b"{"),
    "the next head": request(BODY) + b"GET /health HTTP/1.1\r\na: ",
}


def test_bytes_that_drip_do_not_hold_connections(hasty: int) -> None:
    held: dict[str, float] = {}

    def drip(name: str, sent: bytes) -> None:
        with socket.create_connection(("127.0.0.1", hasty)) as connection:
            connection.sendall(sent)
            held[name] = seconds_open(connection, 5)

    threads = [threading.Thread(target=drip, args=case) for case in DRIPS.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert held.keys() == DRIPS.keys()
    assert {name: seconds for name, seconds in held.items() if seconds > 3} == {}


@pytest.mark.parametrize("sent", [b"", request(BODY)], ids=["never used", "used"])
def test_idle_connections_are_closed(hasty: int, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", hasty), timeout=4) as connection:
        if sent:
            connection.sendall(sent)
            assert read_answer(connection).status == 200
        began = time.monotonic()
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(65536) == b""
        assert time.monotonic() - began < 2.5


def test_slow_heads_and_bodies_are_told_408(hasty: int) -> None:
    for sent in b"GET /health HTTP/1.1\r\n", raw("Content-Length: 10000", body=b"{"):
        answer = say(hasty, sent)
        assert (answer.status, answer.closed) == (408, True)
        assert "did not arrive within 0.6 s" in answer.error["message"]


def test_connections_beyond_the_limit_are_told_503_and_the_rest_are_served() -> None:
    limits = ServerLimits(connections=8)
    served = ServedModel("small", Echo(), chat(), Sampling(), max_context=4096)
    with Server(build_app(served), limits=limits) as server:
        held = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(limits.connections)]
        try:
            for connection in held:  # each of them is known to the server
                connection.sendall(HEALTH)
                assert read_answer(connection).status == 200
            before = open_descriptors()
            answers = [say(server.port, request(BODY)) for _ in range(20)]
            assert {answer.status for answer in answers} <= {503, 0}
            assert open_descriptors() <= before + 2
            held[0].sendall(request(BODY))
            assert read_answer(held[0]).status == 200
        finally:
            for connection in held:
                connection.close()
        ends = time.monotonic() + 5
        while say(server.port, request(BODY)).status != 200:
            assert time.monotonic() < ends


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Wordy:
    """A model whose answers are larger than what the kernel buffers for a client that does not read."""

    async def generate(self, token_ids: Any, sampling: Sampling) -> Generation:
        ids = [5] * 4_000
        return Generation(token_ids=ids, logprobs=[0.0] * len(ids), finish_reason="length", policy_version=0)


@pytest.mark.long
def test_a_client_that_never_reads_is_let_go() -> None:
    served = ServedModel("small", Wordy(), chat(), Sampling(), max_context=4096)
    body = json.dumps(HELLO | {"n": 32, "logprobs": True, "return_tokens_as_token_ids": True}).encode()
    with Server(build_app(served, limits=SHORT), limits=SHORT) as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(request(body))
        state, ends = server._server.server_state, time.monotonic() + 20
        while state.connections or not state.total_requests:
            assert time.monotonic() < ends
            time.sleep(0.05)
        assert say(server.port, request(BODY)).status == 200


def test_others_are_answered_while_a_prompt_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, render = threading.Event(), chat().render

    def slowly(*arguments: Any, **more: Any) -> str:
        entered.set()
        time.sleep(1.0)
        text: str = render(*arguments, **more)
        return text

    monkeypatch.setattr(chat(), "render", slowly)
    served = ServedModel("small", Echo(), chat(), Sampling(), max_context=4096)
    with Server(build_app(served)) as server:
        thread = threading.Thread(target=say, args=(server.port, request(BODY)))
        thread.start()
        assert entered.wait(5)
        answer = say(server.port, HEALTH)
        assert (answer.status, thread.is_alive()) == (200, True)
        assert answer.seconds < 0.5
        thread.join()
