"""Mode agent: the server routes and runs the tools; answers report the route, the calls and the cost."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from trained_router import small_router

from toolwise.agent.agent import Agent
from toolwise.agent.events import AgentAnswer
from toolwise.agent.loader import load_parts
from toolwise.errors import CheckpointError, ConfigError, PolicyError
from toolwise.rollout.chat_tokenizer import ChatTokenizer
from toolwise.serve import Server, build_app
from toolwise.serve.agent_chat import ServedAgent
from toolwise.serve.request import ChatRequest

torch.set_num_threads(1)
HELLO = {"model": "mine", "messages": [{"role": "user", "content": "What is 417 * 38?"}]}


@pytest.fixture(scope="module")
def plain() -> Iterator[str]:
    """An agent without a router."""
    agent = Agent.load("builtin:small", tools=["calculator"])
    with Server(build_app(ServedAgent("mine", agent))) as server:
        yield server.url


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    agent = Agent(small_router(Path(tmp_path_factory.mktemp("agent"))))
    with Server(build_app(ServedAgent("mine", agent))) as server:
        yield server.url


def ask(url: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}/chat/completions", json=HELLO | fields, timeout=60)


def chunks_of(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


def test_the_server_runs_the_tool_and_says_so(plain: str) -> None:
    answer = ask(plain)
    body = answer.json()
    assert body["choices"][0]["message"]["content"] == "Answer: 15846"
    assert (body["usage"]["calls"], body["usage"]["cost"]) == ({"calculator": 1}, 1.0)
    assert (answer.headers["x-toolwise-cost"], json.loads(answer.headers["x-toolwise-calls"])) == (
        "1",
        {"calculator": 1},
    )
    assert [message["role"] for message in body["toolwise"]["messages"]] == ["assistant", "tool", "assistant"]


def test_a_stream_has_the_text_the_calls_and_the_figures(plain: str) -> None:
    answer = ask(plain, stream=True, stream_options={"include_usage": True})
    chunks = chunks_of(answer)
    text = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
    assert text == "Answer: 15846"
    extras = [chunk["toolwise"] for chunk in chunks if "toolwise" in chunk]
    assert extras[0] == {"tool_call": {"name": "calculator", "arguments": {"expression": "417 * 38"}}}
    assert extras[1] == {"tool_result": {"name": "calculator", "content": "15846"}}
    assert extras[-1]["cost"] == chunks[-1]["usage"]["cost"] == 1.0
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert answer.text.endswith("data: [DONE]\n\n")
    assert "x-toolwise-cost" not in answer.headers  # not known yet when headers are sent


def test_usage_is_sent_only_where_it_is_asked_for(plain: str) -> None:
    assert all(chunk["choices"] for chunk in chunks_of(ask(plain, stream=True)))


def test_a_cap_refuses_calls(plain: str) -> None:
    usage = ask(plain, max_cost=0).json()["usage"]
    assert (usage["calls"], usage["cost"]) == ({}, 0.0)
    assert usage["refused_calls"] >= 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "none"}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"max_cots": 0}, "max_cots"),
        ({"budget": 1.0}, "budget"),
        ({"route": "ANSWER"}, "route"),
    ],
)
def test_what_does_not_apply_is_refused(plain: str, fields: dict[str, Any], param: str) -> None:
    answer = ask(plain, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_are_rollouts_with_a_seed_each(plain: str, stream: bool) -> None:
    fields = {"n": 3, "temperature": 3.0, "seed": 5, "max_tokens": 12, "stream": stream}
    answer = ask(plain, **fields, stream_options={"include_usage": True} if stream else None)
    if stream:
        texts, ends, usage = ["", "", ""], [0, 0, 0], {}
        for chunk in chunks_of(answer):
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["delta"].get("content", "")
                ends[choice["index"]] += choice["finish_reason"] is not None
        assert ends == [1, 1, 1]
    else:
        body = answer.json()
        texts, usage = [choice["message"]["content"] for choice in body["choices"]], body["usage"]
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        assert sum(choice["toolwise"]["cost"] for choice in body["choices"]) == usage["cost"]
        assert "toolwise" not in body
    assert len(set(texts)) > 1
    assert usage["completion_tokens"] >= 3
    single = ask(plain, **fields | {"n": 1, "stream": False}).json()
    if not stream:
        assert texts[0] == single["choices"][0]["message"]["content"]
    assert ask(plain, **fields).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_before_a_stop_string(plain: str, stream: bool) -> None:
    answer = ask(plain, stop=["58"], stream=stream)  # the answer is 15846
    if stream:
        chunks = chunks_of(answer)
        text = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
        reason = chunks[-1]["choices"][0]["finish_reason"]
    else:
        (choice,) = answer.json()["choices"]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    assert (text, reason) == ("Answer: 1", "stop")


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"stop": "x"}])
def test_an_engine_that_cannot_sample_so_is_the_clients_error(fields: dict[str, Any]) -> None:
    agent = Agent.load("builtin:small", tools=["calculator"], overrides=["rollout.engine=transformers"])
    with Server(build_app(ServedAgent("mine", agent))) as server:
        answer = ask(server.url, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(fields)))


def test_sampling_options_reach_the_agent(plain: str) -> None:
    greedy = ask(plain).json()["choices"][0]["message"]
    assert ask(plain, temperature=5.0, top_k=1, seed=1).json()["choices"][0]["message"] == greedy
    assert ask(plain, max_tokens=3).json()["choices"][0]["finish_reason"] == "length"


def test_a_route_may_be_given_and_is_reported(routed: str) -> None:
    answer = ask(routed, route="answer")
    assert answer.json()["usage"]["route"] == answer.headers["x-toolwise-route"] == "ANSWER"
    assert answer.json()["usage"]["calls"] == {}
    streamed = ask(routed, route="calculate-family", stream=True)
    assert streamed.headers["x-toolwise-route"] == "CALCULATE-FAMILY"
    assert set(chunks_of(streamed)[0]["toolwise"]) == {"route", "route_probs"}


@pytest.mark.parametrize(("fields", "said"), [({"route": "nowhere"}, "route"), ({"budget": 0.3}, "calibrated")])
@pytest.mark.parametrize("stream", [False, True])
def test_a_route_or_budget_that_cannot_be_kept_is_the_clients_error(
    routed: str, fields: dict[str, Any], said: str, stream: bool
) -> None:
    answer = ask(routed, stream=stream, **fields)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", [CheckpointError, ConfigError, PolicyError])
def test_an_error_of_the_server_is_logged_and_its_text_is_not_sent(
    stream: bool, kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Agent):
        async def aask(self, question: Any, **options: Any) -> AgentAnswer:
            raise kind("/srv/agents/mine/router.json has no route for this budget")

    with Server(build_app(ServedAgent("mine", Broken(load_parts("builtin:small"))))) as server:
        answer = ask(server.url, stream=stream)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (500, None)
    assert not {"/srv", "budget", "route"} & set(error["message"].replace("/", " /").split())
    assert "/srv/agents/mine/router.json" in caplog.text


def test_a_budget_that_the_server_sets_is_not_the_clients_error(tmp_path: Path) -> None:
    agent = Agent(small_router(tmp_path))
    with Server(build_app(ServedAgent("mine", agent, budget=0.3))) as server:
        assert (ask(server.url).status_code, ask(server.url, route="answer").status_code) == (500, 200)
        own = ask(server.url, budget=0.4)
    assert (own.status_code, own.json()["error"]["param"]) == (400, "budget")


def test_a_conversation_that_does_not_fit_is_refused(plain: str) -> None:
    answer = ask(plain, messages=[{"role": "user", "content": "word " * 6000}])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("stream", [False, True])
def test_a_huge_question_is_refused_before_it_is_tokenised(
    plain: str, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    encoded: list[int] = []
    encode = ChatTokenizer.encode
    monkeypatch.setattr(
        ChatTokenizer,
        "encode",
        lambda chat, text: encoded.append(len(text)) or encode(chat, text),  # type: ignore[func-returns-value]
    )
    answer = ask(plain, stream=stream, messages=[{"role": "user", "content": "17 " * 400_000}])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert encoded == []


def test_a_long_question_is_measured_beside_the_event_loop(plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    encode = ChatTokenizer.encode

    def note(chat: ChatTokenizer, text: str) -> list[int]:
        threads.append(threading.current_thread().name)
        return encode(chat, text)

    monkeypatch.setattr(ChatTokenizer, "encode", note)
    answer = ask(plain, messages=[{"role": "user", "content": "word " * 8000}])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert [name for name in threads if not name.startswith("toolwise-text")] == []


def test_a_request_may_only_lower_the_cost(tmp_path: Path) -> None:
    agent = Agent(small_router(tmp_path))
    plain = agent.config.router
    high, low = (ChatRequest.model_validate(HELLO | {"max_cost": cost}) for cost in (9.0, 0.1))
    for given, trained, cap in (None, 0.5, 0.5), (0.25, None, 0.25), (0.25, 0.5, 0.25), (None, None, 9.0):
        router = plain.model_copy(update={"max_cost": trained})
        agent.config = agent.config.model_copy(update={"router": router})
        served = ServedAgent("mine", agent, max_cost=given)
        assert (served._options(high)[0]["cap"], served._options(low)[0]["cap"]) == (cap, 0.1)
