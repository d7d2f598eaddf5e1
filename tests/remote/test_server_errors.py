"""Classification of server errors, by status and by message."""

from __future__ import annotations

import json
from typing import Any

import pytest

from toolwise.errors import ContextFullError, PolicyError
from toolwise.remote.server_errors import (
    MAX_ERROR_CHARS,
    ServerError,
    connection_error,
    error_from_response,
    parse_error_body,
    retry_after_s,
)


def error(**fields: Any) -> bytes:
    return json.dumps({"error": fields}).encode()


@pytest.mark.parametrize(
    ("status", "kind", "retryable"),
    [
        (429, "rate_limited", True),
        (500, "server_error", True),
        (503, "server_error", True),
        (408, "timeout", True),
        (409, "server_error", True),
        (425, "server_error", True),
        (400, "refused", False),
        (401, "refused", False),
        (404, "refused", False),
        (422, "refused", False),
        (307, "redirect", False),
    ],
)
def test_the_status_says_whether_to_ask_again(status: int, kind: str, retryable: bool) -> None:
    fault = error_from_response(status, {}, error(message="no"))
    assert isinstance(fault, ServerError)
    assert isinstance(fault, PolicyError)
    assert (fault.kind, fault.retryable) == (kind, retryable)
    assert f"HTTP {status}: no" in str(fault)


def test_the_wait_that_the_server_asks_for_is_kept() -> None:
    fault = error_from_response(429, {"retry-after": "7"}, b"")
    assert isinstance(fault, ServerError)
    assert fault.wait_s == 7


def test_a_redirect_names_its_place() -> None:
    assert "http://elsewhere/v1" in str(error_from_response(301, {"location": "http://elsewhere/v1"}, b""))


@pytest.mark.parametrize(
    "body",
    [
        error(message="too long", code="context_length_exceeded"),
        error(message="This model's maximum context length is 4096 tokens. However, you requested 5000", code=400),
        error(
            message="You passed 5000 input tokens. However, the model's context length is only 4096 tokens", code=400
        ),
        error(message="The decoder prompt (length 9) is longer than the maximum model length of 8.", code=400),
        error(message="the request exceeds the available context size", type="exceed_context_size_error", code=400),
        json.dumps({"object": "error", "message": "The input (9 tokens) is longer than the model's context length"}),
    ],
)
def test_a_full_context_is_told_from_other_refusals(body: bytes | str) -> None:
    raw = body.encode() if isinstance(body, str) else body
    assert isinstance(error_from_response(400, {}, raw), ContextFullError)
    assert isinstance(error_from_response(500, {}, raw), ServerError)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b'{"error": {"message": "no key"}}', "no key"),
        (b'{"error": "no key"}', "no key"),
        (b'{"detail": [{"msg": "bad"}]}', '[{"msg": "bad"}]'),
        (b'{"message": "no key", "code": 4}', "no key"),
        (b"<html>\n <h1>Bad\tGateway</h1>\n</html>", "<html> <h1>Bad Gateway</h1> </html>"),
        (b"a\x1b[31mred\x00", "a [31mred"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"[" * 100_000, None),
        (b"", ""),
    ],
)
def test_the_servers_words_on_one_line(raw: bytes, said: str | None) -> None:
    words = parse_error_body(raw)[0]
    assert len(words) <= MAX_ERROR_CHARS + 1
    assert words.isprintable()
    if said is not None:
        assert words == said


@pytest.mark.parametrize(("status", "denied"), [(401, True), (403, True), (404, False), (500, False)])
def test_a_refused_key_is_told_from_other_refusals(status: int, denied: bool) -> None:
    fault = error_from_response(status, {}, b"")
    assert isinstance(fault, ServerError)
    assert fault.denied == denied


def test_a_network_that_is_not_allowed_is_said_to_be_so() -> None:
    try:
        try:
            raise PermissionError(1, "Operation not permitted")
        except OSError as refused:
            raise OSError("All connection attempts failed") from refused
    except OSError as fault:
        failure = connection_error(fault)
    assert (failure.denied, failure.retryable) == (True, False)
    assert "permissions=('network',)" in str(failure)
    assert connection_error(OSError("reset")).retryable


@pytest.mark.parametrize(
    ("header", "low", "high"),
    [("3", 3, 3), ("Wed, 21 Oct 2015 07:28:00 GMT", 0, 0), ("Fri, 01 Jan 2100 00:00:00 GMT", 1e9, 1e10)],
)
def test_what_retry_after_asks_for(header: str, low: float, high: float) -> None:
    seconds = retry_after_s(header)
    assert seconds is not None
    assert low <= seconds <= high


@pytest.mark.parametrize("header", [None, "", "soon", "-3", "²", "inf"])
def test_a_retry_after_that_says_nothing(header: str | None) -> None:
    assert retry_after_s(header) is None
