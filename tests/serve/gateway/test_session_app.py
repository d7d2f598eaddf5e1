"""The gateway over real HTTP: sessions and their keys, chat completions, streams, token ids, and late calls."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
from agent_sessions import CALL, DECISION, TASK, TOOLS, session_with

from toolwise.concurrency import deadlines
from toolwise.errors import PolicyError
from toolwise.models import load_model
from toolwise.policies.local import LocalPolicy
from toolwise.protocols import Sampling
from toolwise.rollout.agents.agent_request import task_fields
from toolwise.rollout.agents.recorded_session import RecordedSession
from toolwise.serve.gateway.gateway_server import Gateway
from toolwise.tools import build_tools

Talk = Callable[[httpx.AsyncClient, RecordedSession], Coroutine[Any, Any, None]]
HELLO: dict[str, Any] = {"model": "any", "messages": [m.to_openai() for m in TASK.prompt]}


def serve(session_replies: list[Any], talk: Talk, **options: Any) -> Gateway:
    """Run `talk` against a gateway with one session, in one event loop."""
    gateway = Gateway()

    async def work() -> None:
        session = session_with(*session_replies, **options)
        base_url = await gateway.open(session)
        headers = {"authorization": f"Bearer {session.api_key}"}
        async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=10) as client:
            await talk(client, session)
        gateway.end(session)
        gateway.close()

    deadlines.run(work())
    return gateway


def test_a_conversation_with_tools() -> None:
    async def talk(client: httpx.AsyncClient, session: RecordedSession) -> None:
        answer = (await client.post("/chat/completions", json=HELLO | {"tools": TOOLS})).json()
        message = answer["choices"][0]["message"]
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        assert message["content"] is None
        (call,) = message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"expression": "2 + 2"}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "4"}
        second = HELLO | {"messages": [*HELLO["messages"], message, result], "tools": TOOLS}
        answer = (await client.post("/chat/completions", json=second)).json()
        assert answer["choices"][0]["message"]["content"] == "It is 4."
        assert [c.origin for c in session.calls] == ["first", "continued"]
        assert answer["usage"]["completion_tokens"] == len(session.calls[1].tokens.token_ids)

    serve([CALL, "It is 4."], talk)


def test_a_stream_and_token_ids() -> None:
    async def talk(client: httpx.AsyncClient, session: RecordedSession) -> None:
        body = HELLO | {"stream": True, "stream_options": {"include_usage": True}, "tools": TOOLS}
        streamed = await client.post("/chat/completions", json=body)
        events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
        parts = [part for event in events[:-1] for part in event["choices"][0]["delta"].get("tool_calls", ())]
        assert parts[0]["function"]["name"] == "calculator"
        assert len(parts) > 5
        assert json.loads("".join(part["function"]["arguments"] for part in parts)) == {"expression": "2 + 2"}
        assert parts[0]["id"] == session.calls[0].public_ids[0]
        assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"
        assert events[-1]["usage"]["total_tokens"] > 0
        assert streamed.text.endswith("data: [DONE]\n\n")
        asked = {"return_token_ids": True, "logprobs": True, "return_tokens_as_token_ids": True}
        answer = (await client.post("/chat/completions", json=HELLO | asked)).json()
        call = session.calls[1].tokens
        assert answer["prompt_token_ids"] == list(call.prompt_ids)
        assert answer["choices"][0]["token_ids"] == list(call.token_ids)
        first = answer["choices"][0]["logprobs"]["content"][0]
        assert (first["token"], first["logprob"]) == (f"token_id:{call.token_ids[0]}", -0.5)

    serve([CALL, "4"], talk)


def test_a_stream_is_the_recorded_reply_token_by_token() -> None:
    async def talk(client: httpx.AsyncClient, session: RecordedSession) -> None:
        body = HELLO | {"stream": True, "stop": ["END"], "return_token_ids": True, "logprobs": True}
        streamed = await client.post("/chat/completions", json=body)
        events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
        texts = [event["choices"][0]["delta"].get("content", "") for event in events]
        assert len([text for text in texts if text]) == len("One two ")
        assert "".join(texts) == session.calls[0].reply.content == "One two "
        last = events[-1]["choices"][0]
        assert last["finish_reason"] == "stop"
        assert last["token_ids"] == list(session.calls[0].tokens.token_ids)
        assert len(last["logprobs"]["content"]) == len(last["token_ids"])
        assert events[-1]["prompt_token_ids"] == list(session.calls[0].tokens.prompt_ids)

    serve(["One two END three"], talk)


def test_a_stream_that_fails_before_its_first_token_is_a_plain_error() -> None:
    async def talk(client: httpx.AsyncClient, session: RecordedSession) -> None:
        answer = await client.post("/chat/completions", json=HELLO | {"stream": True})
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        assert session.policy_fault is not None

    serve([PolicyError("no memory left")], talk)


def test_a_stream_whose_reader_leaves_is_not_recorded() -> None:
    async def talk(client: httpx.AsyncClient, session: RecordedSession) -> None:
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/chat/completions", json=HELLO | {"stream": True}, timeout=0.3)
        answer = await client.post("/chat/completions", json=HELLO | {"stream": True})
        assert '"4"' in answer.text
        assert [call.reply.content for call in session.calls] == ["4"]

    serve([asyncio.Event(), "4"], talk)


def test_the_openai_client_reads_calls_and_text_token_by_token() -> None:
    openai = pytest.importorskip("openai")
    policy = LocalPolicy(*load_model("builtin:small", device="cpu"), Sampling(max_new_tokens=64))
    policy.engine.streams.interval_s = 0  # type: ignore[attr-defined]
    question: list[Any] = [{"role": "user", "content": "What is 417 * 38?"}]
    tools = [tool.get_openai_tool_schema().model_dump() for tool in build_tools(["calculator"]).values()]

    async def work() -> None:
        gateway, session = Gateway(), RecordedSession(DECISION, policy, do_sample=False)
        url = await gateway.open(session)
        async with openai.AsyncOpenAI(base_url=url, api_key=session.api_key, max_retries=0, timeout=60) as client:
            completions, fixed = client.chat.completions, {"model": "any", "tools": tools}
            async with completions.stream(messages=question, **fixed) as stream:
                deltas = [event async for event in stream if event.type == "tool_calls.function.arguments.delta"]
                message = (await stream.get_final_completion()).choices[0].message
            assert len(deltas) > 5
            call = message.tool_calls[0]
            result = {"role": "tool", "tool_call_id": call.id, "content": "15846"}
            second = await completions.create(messages=[*question, message, result], stream=True, **fixed)
            texts = [chunk.choices[0].delta.content or "" async for chunk in second]
            assert "".join(texts) == "Answer: 15846"
            assert len([text for text in texts if text]) > 3
        assert [recorded.origin for recorded in session.calls] == ["first", "continued"]
        gateway.end(session)
        gateway.close()

    deadlines.run(work())
    policy.close()


def test_an_agent_of_the_examples_is_recorded_as_one_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loop with the real client, of which the long tests train the model."""
    pytest.importorskip("openai")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples" / "agents"))
    loop = importlib.import_module("openai_loop")

    async def talk(client: httpx.AsyncClient, session: RecordedSession) -> None:
        base_url = str(client.base_url).rstrip("/")
        await asyncio.to_thread(loop.run, task_fields(session.decision), base_url, session.api_key)
        assert [call.origin for call in session.calls] == ["first", "continued"]
        rollout = session.close()
        assert [(m.role, m.content) for m in rollout.messages[2:]] == [("tool", "4"), ("assistant", "It is 4.")]
        assert dict(rollout.usage.calls) == {"calculator": 1}

    serve([CALL, "It is 4."], talk)


def test_tokens_in_and_out_as_vllm_has_it() -> None:
    async def talk(client: httpx.AsyncClient, session: RecordedSession) -> None:
        root = str(client.base_url).rstrip("/").removesuffix("/v1")
        prompt = session.policy.chat.start(TASK.prompt)
        params = {"max_tokens": 5, "stop_token_ids": [1], "logprobs": 1, "temperature": 0.2}
        body = {"model": "any", "token_ids": prompt, "sampling_params": params}
        answer = (await client.post(f"{root}/inference/v1/generate", json=body)).json()
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "length"
        assert len(choice["token_ids"]) == 5
        assert [e["token"] for e in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in choice["token_ids"]]
        assert session.calls[0].tokens.prompt_ids.tolist() == prompt  # type: ignore[attr-defined]
        refused = await client.post(f"{root}/inference/v1/generate", json=body | {"sampling_params": {"top_p": 0.5}})
        assert refused.status_code == 400
        (model,) = (await client.get("/models")).json()["data"]
        assert model["max_model_len"] == 4096

    serve(["It is 4."], talk)


def test_token_ids_outside_the_vocabulary_are_refused() -> None:
    async def talk(client: httpx.AsyncClient, session: RecordedSession) -> None:
        root = str(client.base_url).rstrip("/").removesuffix("/v1")
        answer = await client.post(f"{root}/inference/v1/generate", json={"token_ids": [1, 2**31 - 1]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "token_ids")
        assert session.policy_fault is None

    serve(["4"], talk)


def test_a_conversation_that_cannot_fit_is_refused_before_it_is_rendered() -> None:
    async def talk(client: httpx.AsyncClient, session: RecordedSession) -> None:
        assert session.max_prompt_chars is not None
        long = {"role": "user", "content": "x" * (session.max_prompt_chars + 1)}
        answer = await client.post("/chat/completions", json=HELLO | {"messages": [long]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert (await client.post("/chat/completions", json=HELLO)).status_code == 200

    serve(["4"], talk)


def test_a_call_that_waits_for_the_model_holds_no_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolwise.serve.guard.MAX_TOTAL_BODY_BYTES", 1000)
    waits = asyncio.Event()

    async def talk(client: httpx.AsyncClient, session: RecordedSession) -> None:
        body = HELLO | {"user": "x" * 700}
        first = asyncio.ensure_future(client.post("/chat/completions", json=body))
        policy: Any = session.policy
        while not policy.asked:  # noqa: ASYNC110 (the server has no event)
            await asyncio.sleep(0.005)
        assert (await client.post("/chat/completions", json=body)).status_code == 200
        waits.set()
        assert (await first).status_code == 200

    serve([waits, "second"], talk)


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"top_p": 0.5}, 400, "unsupported_parameter"),
        ({"n": 2}, 400, "unsupported_parameter"),
        ({"tool_choice": "required"}, 400, "unsupported_parameter"),
        ({"messages": []}, 400, None),
        ({"stop": ["a"] * 300}, 400, None),
        ({}, 500, None),
    ],
)
def test_what_a_client_may_not_do(change: dict[str, Any], status: int, code: str | None) -> None:
    async def talk(client: httpx.AsyncClient, session: RecordedSession) -> None:
        answer = await client.post("/chat/completions", json=HELLO | change)
        assert answer.status_code == status
        assert answer.json()["error"]["code"] == code
        assert session.calls == []

    serve([PolicyError("down")], talk)


def test_neutral_values_and_the_temperature_are_accepted() -> None:
    async def talk(client: httpx.AsyncClient, session: RecordedSession) -> None:
        body = HELLO | {"temperature": 0.1, "top_p": 1.0, "n": 1, "seed": 7, "parallel_tool_calls": True}
        assert (await client.post("/chat/completions", json=body)).status_code == 200
        policy: Any = session.policy
        assert policy.asked[0][1].temperature == 1.0

    serve(["4"], talk)


def test_a_key_opens_its_session_only_and_a_late_call_is_counted() -> None:
    async def talk(client: httpx.AsyncClient, session: RecordedSession) -> None:
        wrong = await client.post("/chat/completions", json=HELLO, headers={"authorization": "Bearer x"})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (401, "invalid_api_key")
        nobody = await client.post(str(client.base_url).replace(session.session_id, "none") + "chat/completions")
        assert nobody.status_code in (404, 415)
        gateway.sessions.end(session)
        session.close()
        late = await client.post("/chat/completions", json=HELLO)
        assert (late.status_code, late.json()["error"]["code"]) == (410, "session_ended")

    gateway = Gateway()

    async def work() -> None:
        session = session_with("4")
        base_url = await gateway.open(session)
        headers = {"authorization": f"Bearer {session.api_key}"}
        async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=10) as client:
            await talk(client, session)
        gateway.close()

    deadlines.run(work())
    assert gateway.sessions.late_calls == 1


def test_the_limits_of_a_session_are_errors_that_no_client_retries() -> None:
    async def talk(client: httpx.AsyncClient, session: RecordedSession) -> None:
        assert (await client.post("/chat/completions", json=HELLO)).status_code == 200
        answer = await client.post("/chat/completions", json=HELLO)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "max_steps")

    serve(["1", "2"], talk, max_calls=1)


def test_a_client_that_leaves_is_not_recorded() -> None:
    async def talk(client: httpx.AsyncClient, session: RecordedSession) -> None:
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/chat/completions", json=HELLO, timeout=0.2)
        answer = await client.post("/chat/completions", json=HELLO)
        assert answer.json()["choices"][0]["message"]["content"] == "second"
        assert [call.text for call in session.calls] == ["second"]

    serve([asyncio.Event(), "second"], talk)
