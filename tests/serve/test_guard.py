"""Bearer keys: who gets in, and what is open to all."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import httpx
import pytest
from raw_http import HELLO, Echo

from toolwise.errors import ConfigError
from toolwise.models import load_model
from toolwise.protocols import Sampling
from toolwise.serve import ServedModel, Server, build_app
from toolwise.serve.guard import ApiKeys

KEYS = ["first-key-of-the-test", "second-key-of-the-test"]


@cache
def chat() -> Any:
    return load_model("builtin:small", device="cpu")[1]


@pytest.fixture(scope="module")
def root() -> Iterator[str]:
    served = ServedModel("small", Echo(), chat(), Sampling())
    with Server(build_app(served, keys=KEYS)) as server:
        yield server.url.removesuffix("/v1")


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens(root: str, key: str) -> None:
    headers = {"Authorization": f"Bearer {key}"}
    assert httpx.post(f"{root}/v1/chat/completions", json=HELLO, headers=headers).status_code == 200
    assert "toolwise_responses_total" in httpx.get(f"{root}/metrics", headers=headers).text


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer wrong", f"Basic {KEYS[0]}", f"Bearer {KEYS[0]}x", f"Bearer {KEYS[0]},{KEYS[1]}"],
)
def test_anything_else_is_refused_before_the_body_is_read(root: str, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    for answer in (
        httpx.post(f"{root}/v1/chat/completions", content=b"not even JSON", headers=headers),
        httpx.get(f"{root}/metrics", headers=headers),
        httpx.get(f"{root}/v1/nowhere", headers=headers),
    ):
        assert answer.status_code in (401, 415) if answer.request.method == "POST" else answer.status_code == 401
        assert not any(key in answer.text for key in KEYS)
    refused = httpx.post(f"{root}/v1/chat/completions", json=HELLO, headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    assert refused.headers["www-authenticate"] == "Bearer"


def test_health_is_open_to_all(root: str) -> None:
    assert httpx.get(f"{root}/health").json() == {"status": "ok"}
    assert httpx.get(f"{root}/ready").json() == {"status": "ready"}


@pytest.mark.parametrize("key", ["short", "with a space in the key", "line\nbreak-in-this-key", "schlüssel-mit-umlaut"])
def test_a_weak_or_odd_key_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="at least 16 printable"):
        ApiKeys([key])
