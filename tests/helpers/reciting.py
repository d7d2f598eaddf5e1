"""Replies and thoughts that follow the thinking format, on the run's own engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolwise.messages import Message
from toolwise.protocols import Generation, Sampling
from toolwise.thinking.thinking_model import EngineModel
from toolwise.training.run import Run
from toolwise.types import Task

THINKING_TASKS = [Task(task_id=str(i), prompt=[Message(role="user", content=f"Where is key {i}?")]) for i in range(4)]
REPLIES = [
    "<level>1</level><action>go left</action>",
    "<level>3</level><think>State: a hall Goal: out</think><action>go right</action>",
    "<level>2</level><think>State: a hall</think><action>go left</action>",
    "no format at all",
]


class RecitingEngine:
    """The run's own engine, but for replies and thoughts that follow the format, as likely as the model finds them."""

    def __init__(self, run: Run) -> None:
        self.run, self.engine, self.calls = run, run.policy.engine, 0

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, **more: Any) -> Generation:
        chat = self.run.chat
        said = chat.decode(token_ids)
        if said.endswith("<think>"):
            ids = chat.encode("State: a hall. Go on.</think>")
        else:
            ids = [*chat.encode(REPLIES[self.calls % len(REPLIES)]), chat.end_id]
            self.calls += 1
        [scored] = await self.engine.score(token_ids, [ids], temperature=sampling.temperature)
        return Generation(ids, list(scored.logprobs), "stop", self.engine.version)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def recite(run: Run) -> Run:
    reciting: Any = RecitingEngine(run)
    run.policy.engine = reciting
    if run.thinking is not None:
        object.__setattr__(run.thinking.writer, "model", EngineModel(reciting))
    return run
