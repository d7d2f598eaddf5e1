"""Any request is answered: with a completion, or with an error of the client's in OpenAI's form."""

from __future__ import annotations

import asyncio
import json
from functools import cache
from typing import Any

import httpx
from fuzzing import JSON, NUMBERS, TEXT, fuzz
from hypothesis import strategies as st

from toolwise.models import load_model
from toolwise.policies.local import LocalPolicy
from toolwise.protocols import Sampling
from toolwise.serialization.json_text import json_text
from toolwise.serve import ServedModel, build_app

FUNCTION = st.fixed_dictionaries({"name": TEXT, "arguments": TEXT})
CALL = st.fixed_dictionaries({"type": st.just("function"), "function": FUNCTION})
ROLES = st.sampled_from(["user", "system", "assistant", "tool"])
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.one_of(st.sampled_from(["user", "system", "assistant", "tool"]), JSON),
        "content": st.one_of(TEXT, JSON),
    },
    optional={"tool_calls": st.one_of(st.lists(CALL, max_size=2), JSON), "tool_call_id": JSON, "name": JSON},
)
OPTIONS = [
    "temperature",
    "top_p",
    "top_k",
    "n",
    "seed",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "stream",
    "logprobs",
    "top_logprobs",
    "tools",
    "tool_choice",
    "response_format",
    "return_token_ids",
    "presence_penalty",
    "logit_bias",
    "user",
    "metadata",
    "prompt_token_ids",
    "stop_token_ids",
    "min_p",
    "repetition_penalty",
    "odd",
]
REQUEST = st.fixed_dictionaries(
    {"model": st.one_of(st.just("small"), JSON), "messages": st.one_of(st.lists(MESSAGE, max_size=3), JSON)},
    optional=dict.fromkeys(OPTIONS, st.one_of(NUMBERS, JSON)),
)
GOOD = {"model": "small", "messages": [{"role": "user", "content": "hi"}]}
NEARLY = st.fixed_dictionaries({}, optional=dict.fromkeys(OPTIONS, st.one_of(NUMBERS, JSON))).map(
    lambda more: {**GOOD, **more}
)
BODIES = st.one_of(
    REQUEST.map(lambda value: json.dumps(value).encode() if _printable(value) else b"{}"),
    NEARLY.map(lambda value: json.dumps(value).encode() if _printable(value) else b"{}"),
    JSON.map(lambda value: json_text(value).encode()),
    st.binary(max_size=100),
    st.sampled_from([b"[" * 100_000, b'{"model":' * 3_000, b"9" * 5_000, b'{"messages": NaN}', b"\xff\xfe{}", b""]),
)
OTHERS = st.sampled_from(["/health", "/v1/models", "/v1", "/%00", "/..%2f", "//"])
PATHS = st.one_of(st.just("/v1/chat/completions"), OTHERS)
METHODS = st.sampled_from(["POST", "POST", "POST", "GET", "PUT", "DELETE", "OPTIONS"])
HEADERS = st.dictionaries(
    st.sampled_from(["content-type", "accept", "authorization", "content-encoding", "x-odd"]),
    st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20),
    max_size=2,
)


def _printable(value: Any) -> bool:
    try:
        json.dumps(value)
    except ValueError:
        return False
    return True


@cache
def app() -> Any:
    policy = LocalPolicy(*load_model("builtin:small", device="cpu"), Sampling(max_new_tokens=2))
    return build_app(ServedModel.of(policy, "small"))


async def ask(method: str, path: str, body: bytes, headers: dict[str, str]) -> httpx.Response:
    transport = httpx.ASGITransport(app(), raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as client:
        given = {"content-type": "application/json", **headers}
        return await client.request(method, path, content=body, headers=given)


@fuzz(METHODS, PATHS, BODIES, HEADERS, examples=20)
def test_any_request_is_answered(method: str, path: str, body: bytes, headers: dict[str, str]) -> None:
    answer = asyncio.run(asyncio.wait_for(ask(method, path, body, headers), 60))
    assert answer.status_code < 500, answer.text[:500]
    if answer.status_code >= 400 and path == "/v1/chat/completions" and method == "POST":
        error = answer.json()["error"]
        assert isinstance(error["message"], str)
        assert len(error["message"]) < 5_000
    elif "application/json" in answer.headers.get("content-type", ""):
        json.loads(answer.text, parse_constant=lambda word: 1 / 0)
