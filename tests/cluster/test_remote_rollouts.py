"""What the loops tell rollout workers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from toolwise.cluster.interface import ClusterError, Payload
from toolwise.cluster.remote_rollouts import RemoteScheduler, RolloutWorkers
from toolwise.messages import Message
from toolwise.training.async_loop import AsyncLoop
from toolwise.types import RouteDecision, Task


class NotesSteps:
    """A pool of workers that notes the step of each ticket, and fails."""

    def __init__(self) -> None:
        self.steps: list[Any] = []

    async def run(self, ticket: Payload, stored: Any = None) -> Payload:
        self.steps.append(ticket["step"])
        raise ClusterError("no worker")


@pytest.mark.parametrize(("batch_step", "seen"), [(5, 5), (None, 3)])
def test_rewards_on_workers_see_the_step_of_their_batch(batch_step: Any, seen: int) -> None:
    pool, policy = NotesSteps(), SimpleNamespace(engine=None, version=0)
    workers = RolloutWorkers(
        cast(Any, pool),
        cast(Any, None),
        cast(Any, policy),
        cast(Any, SimpleNamespace(step=3)),
        cast(Any, None),
        cast(Any, None),
    )
    scheduler = RemoteScheduler(cast(Any, policy), {}, workers=workers)
    prompt = [Message(role="user", content="?")]
    decision = RouteDecision(Task(task_id="t", prompt=prompt), "g", 1, 0, prompt)
    run = SimpleNamespace(scheduler=scheduler, config=SimpleNamespace(rollout=SimpleNamespace(do_sample=True)))
    loop, tickets = cast(Any, SimpleNamespace(run=run)), cast(Any, {0: ("ticket", 1)})
    with pytest.raises(ClusterError, match="no worker"):
        asyncio.run(AsyncLoop._roll_out(loop, [decision], tickets, batch_step))
    assert pool.steps == [seen]
