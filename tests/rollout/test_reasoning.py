"""Reasoning that a server returns separately: kept, sent back in later turns, and recorded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
from transformers import AutoTokenizer

from toolwise.messages import Message
from toolwise.models import locate
from toolwise.policies.openai.policy import OpenAIAgentPolicy
from toolwise.rollout.chat_tokenizer import ChatTokenizer
from toolwise.rollout.control_tokens import strip_guard_marks
from toolwise.rollout.worker import RLRolloutWorker
from toolwise.tools import build_tools
from toolwise.training.records import RolloutRecord
from toolwise.types import EvaluateResult, ScoredRollout, Task

THOUGHT = "A sum: the calculator knows."
TASK = Task(task_id="t", prompt=[Message(role="user", content="2 + 2?")])
TURNS = [
    {
        "content": "",
        "reasoning_content": THOUGHT,
        "tool_calls": [{"id": "c", "function": {"name": "calculator", "arguments": '{"expression": "2 + 2"}'}}],
    },
    {"content": "4", "reasoning": "It said 4."},
]


def test_a_server_reads_in_the_second_turn_what_it_thought_in_the_first() -> None:
    asked: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        return httpx.Response(200, json={"choices": [{"message": TURNS[len(asked) - 1], "finish_reason": "stop"}]})

    async def episode() -> RLRolloutWorker:
        client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
        policy = OpenAIAgentPolicy("http://server/v1", "m", client=client)
        worker = RLRolloutWorker(TASK, policy, tools=build_tools(["calculator"]))
        await worker.run_episode()
        return worker

    worker = asyncio.run(episode())
    assert asked[1]["messages"][1]["reasoning_content"] == THOUGHT
    assert [m.reasoning_content for m in worker.messages if m.role == "assistant"] == [THOUGHT, "It said 4."]
    rollout = worker.to_rollout()
    record = RolloutRecord.of(ScoredRollout(rollout, EvaluateResult(score=1.0), rollout.steps))
    assert record.messages[1]["reasoning_content"] == THOUGHT


class Thinker:
    """A user policy that returns its reasoning separately."""

    async def get_action(self, observation: Sequence[Message], available_tools_specs: Any = None) -> Any:
        if len(observation) > 1:
            return {"type": "text", "content": observation[1].reasoning_content}, None, None, None
        call = {"name": "calculator", "arguments": {"expression": "1"}}
        return {"type": "tool_call", **call, "reasoning_content": THOUGHT}, None, None, None


def test_any_policy_sees_its_own_thoughts_again() -> None:
    worker = RLRolloutWorker(TASK, Thinker(), tools=build_tools(["calculator"]))
    asyncio.run(worker.run_episode())
    assert worker.messages[-1].content == THOUGHT


def test_a_template_that_writes_them_gets_them() -> None:
    tokenizer = AutoTokenizer.from_pretrained(locate("builtin:small"))
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}"
        "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    said = Message(role="assistant", content="4", reasoning_content="<|end|>hm")
    chat = ChatTokenizer(tokenizer)
    rendered = chat.render([*TASK.prompt, said])
    assert "[<|end|>hm]4" in strip_guard_marks(rendered)
    assert chat.encode(rendered).count(chat.end_id) == 2  # a thought cannot end its turn
