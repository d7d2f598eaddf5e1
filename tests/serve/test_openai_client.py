"""The real `openai` client against the server: plain, streamed, async, tools, structured output, errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest
import torch
from pydantic import BaseModel

from toolwise.agent.agent import Agent
from toolwise.models import load_model
from toolwise.policies.local import LocalPolicy
from toolwise.protocols import Sampling
from toolwise.serve import ServedModel, Server, build_app
from toolwise.serve.agent_chat import ServedAgent
from toolwise.tools import build_tools

openai = pytest.importorskip("openai")
torch.set_num_threads(1)
KEY = "a-key-for-the-client"
QUESTION = [{"role": "user", "content": "What is 417 * 38?"}]
SPECS = [tool.get_openai_tool_schema().model_dump() for tool in build_tools(["calculator"]).values()]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A model, for which the client runs the tools."""
    policy = LocalPolicy(*load_model("builtin:small", device="cpu"), Sampling(max_new_tokens=64))
    policy.engine.streams.interval_s = 0  # an event for each token
    with Server(build_app(ServedModel.of(policy, "small"), keys=[KEY])) as server:
        yield server.url


@pytest.fixture(scope="module")
def agent_url() -> Iterator[str]:
    """An agent that runs its own tools."""
    agent = Agent.load("builtin:small", tools=["calculator"])
    with Server(build_app(ServedAgent("mine", agent), keys=[KEY])) as server:
        yield server.url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=60) as made:
        yield made


def test_models_and_a_completion(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["small"]
    answer = client.chat.completions.create(
        model="small", messages=QUESTION, temperature=0.7, top_p=0.9, seed=3, n=2, logprobs=True, top_logprobs=2
    )
    assert len(answer.choices) == 2
    assert all(len(entry.top_logprobs) == 2 for entry in answer.choices[0].logprobs.content)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="small", messages=QUESTION, temperature=0).choices[0].message.content
    stream = client.chat.completions.create(
        model="small", messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    assert chunks[-1].usage.completion_tokens > 0


def test_a_conversation_with_a_tool_that_the_client_runs(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model="small", messages=QUESTION, tools=SPECS, temperature=0)
    (call,) = first.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("calculator", {"expression": "417 * 38"})
    messages = [*QUESTION, first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "15846"}]
    second = client.chat.completions.create(model="small", messages=messages, tools=SPECS, temperature=0)
    assert second.choices[0].message.content == "Answer: 15846"


def test_the_clients_own_reader_of_streams_joins_calls(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="small", messages=QUESTION, tools=SPECS, temperature=0) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls[0].function.name == "calculator"
    assert json.loads(message.tool_calls[0].function.arguments) == {"expression": "417 * 38"}


def test_a_call_is_streamed_token_by_token(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="small", messages=QUESTION, tools=SPECS, temperature=0, stream=True)
    chunks = [chunk.choices[0] for chunk in stream]
    parts = [part for choice in chunks for part in choice.delta.tool_calls or ()]
    assert (parts[0].id, parts[0].function.name) == ("call_0", "calculator")
    assert all(part.id is None and part.function.name is None for part in parts[1:])
    assert len(parts) > 5
    assert json.loads("".join(part.function.arguments for part in parts)) == {"expression": "417 * 38"}
    assert [choice.finish_reason for choice in chunks if choice.finish_reason] == ["tool_calls"]


class Sum(BaseModel):
    total: int
    sure: bool


def test_structured_output(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="small", messages=QUESTION, temperature=0, response_format=Sum, max_tokens=200
    )
    assert isinstance(answer.choices[0].message.parsed, Sum)


def test_many_at_once_from_the_async_client(url: str) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=60) as client:

            async def read(number: int) -> str:
                messages = [{"role": "user", "content": f"What is {number} + 1?"}]
                stream = await client.chat.completions.create(
                    model="small", messages=messages, stream=True, temperature=0, max_tokens=12
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*map(read, range(20)))

    texts = asyncio.run(ask())
    assert len(texts) == 20
    assert all(texts)


def test_errors_are_the_clients_own_types(client: openai.OpenAI, url: str) -> None:
    with pytest.raises(openai.NotFoundError, match="available: small"):
        client.chat.completions.create(model="large", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="context"):
        client.chat.completions.create(model="small", messages=QUESTION, max_tokens=10_000)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=url, api_key="wrong", max_retries=0, timeout=60).models.list()


def test_an_agent_reports_route_calls_and_cost(agent_url: str) -> None:
    client = openai.OpenAI(base_url=agent_url, api_key=KEY, max_retries=0, timeout=60)
    raw = client.chat.completions.with_raw_response.create(
        model="mine", messages=QUESTION, extra_body={"max_cost": 2.0}
    )
    assert raw.headers["x-toolwise-cost"] == "1"
    answer = raw.parse()
    assert answer.choices[0].message.content == "Answer: 15846"
    assert (answer.usage.calls, answer.usage.cost) == ({"calculator": 1}, 1.0)
    chunks = list(client.chat.completions.create(model="mine", messages=QUESTION, stream=True))
    assert [set(chunk.toolwise) for chunk in chunks if hasattr(chunk, "toolwise")][:2] == [
        {"tool_call"},
        {"tool_result"},
    ]
