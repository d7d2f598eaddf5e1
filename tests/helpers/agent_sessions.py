"""A policy that replies with prepared texts, in tokens of its own, and sessions over it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import chat_tokenizers as made

from toolwise.messages import Message
from toolwise.protocols import Generation, Sampling
from toolwise.rollout.agents.recorded_session import RecordedSession
from toolwise.rollout.call_format import find_format
from toolwise.rollout.tokens import OnChange
from toolwise.types import RouteDecision, Task

TASK = Task(task_id="t", prompt=[Message(role="user", content="What is 2 + 2?")], ground_truth="4")
DECISION = RouteDecision(TASK, "g", 1, 0, TASK.prompt)
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "calculator", "description": "", "parameters": {"properties": {}}}}
]
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2 + 2"}}\n</tool_call>'


class PreparedPolicy:
    """Replies with `replies` in order; an exception among them is raised, an event is waited for."""

    def __init__(self, *replies: Any, template: str = "qwen2_5") -> None:
        self.chat = made.chat_tokenizer(template, "tagged")
        self.sampling = Sampling(max_new_tokens=256, stop_token_ids=self.chat.stop_ids)
        self.call_format = find_format("hermes")
        self.on_change: OnChange = "append"
        self.max_context = 4096
        self.replies = list(replies)
        self.asked: list[tuple[list[int], Sampling]] = []

    has_grammar = False

    def constraint(self, tools: Any = None) -> None:
        return None

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, on_tokens: Any = None) -> Generation:
        self.asked.append((list(token_ids), sampling))
        reply = self.replies.pop(0)
        if isinstance(reply, asyncio.Event):
            await reply.wait()
            reply = "late"
        if isinstance(reply, Exception):
            raise reply
        ids = [i for letter in reply for i in self.chat.encode(letter)]
        cut = len(ids) + 1 > sampling.max_new_tokens
        ids = ids[: sampling.max_new_tokens] if cut else [*ids, self.chat.end_id]
        for token in ids if on_tokens is not None else ():
            await asyncio.sleep(0)
            on_tokens([token])
        return Generation(ids, [-0.5] * len(ids), "length" if cut else "stop", 3)


def session_with(*replies: Any, **options: Any) -> RecordedSession:
    return RecordedSession(DECISION, PreparedPolicy(*replies), **options)
