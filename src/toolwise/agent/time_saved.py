"""What direct answers save: the same prompts one at a time, routed and with all their tools."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from toolwise.agent.agent import Agent
from toolwise.types import Task


@dataclass(frozen=True, slots=True)
class TimeSaved:
    """Mean seconds per prompt."""

    prompts: int
    direct_s: float
    """Including routing."""
    with_tools_s: float

    def describe(self) -> str:
        return (
            f"a prompt answered directly takes {self.direct_s:.3f} s including routing, and {self.with_tools_s:.3f} s "
            f"with all tools: {self.with_tools_s - self.direct_s:+.3f} s saved per prompt ({self.prompts} prompts, one "
            "at a time)"
        )


async def time_saved(agent: Agent, tasks: Sequence[Task], *, limit: int = 16) -> TimeSaved | None:
    """Measured on the first prompts that the router would answer directly; None if there are none."""
    routing = agent.routing if agent.has_router else None
    name = None if routing is None else routing.routes.direct
    if routing is None or name is None:
        return None
    pairs = zip(tasks, routing.predict(tasks), strict=True)
    index = routing.routes.index(name)
    direct = [task for task, prediction in pairs if routing.at_budget(prediction, task, None).argmax() == index][:limit]
    if not direct:
        return None
    await agent.answer(direct[0], route=name)  # warm up
    routed_s, with_tools_s = [], []
    for task in direct:
        routed_s.append((await agent.answer(task, route=name)).seconds)
        start = time.perf_counter()
        (request,) = agent.scheduler.requests([routing.decide(task, None)], do_sample=False)
        await request.run()
        with_tools_s.append(time.perf_counter() - start)
    return TimeSaved(len(direct), sum(routed_s) / len(direct), sum(with_tools_s) / len(direct))
