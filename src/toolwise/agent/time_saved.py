"""What answering directly saves: the same prompts one at a time, once as routed and once with all their tools."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from toolwise.agent.agent import RoutedAgent
from toolwise.routing.actions import RouteAction
from toolwise.types import Task


@dataclass(frozen=True, slots=True)
class TimeSaved:
    """Seconds a prompt, on average."""

    prompts: int
    direct_s: float
    """Routing included."""
    with_tools_s: float

    def describe(self) -> str:
        saved = self.with_tools_s - self.direct_s
        return (
            f"a prompt answered directly takes {self.direct_s:.3f} s, routing included; with all tools on offer the "
            f"same take {self.with_tools_s:.3f} s: {saved:+.3f} s saved each ({self.prompts} prompts, one at a time)"
        )


async def time_saved(agent: RoutedAgent, tasks: Sequence[Task], *, limit: int = 16) -> TimeSaved | None:
    """Over the first prompts that the router would answer directly; None where it would answer none so."""
    weighed = agent.routing.predict(tasks)
    direct = [task for task, word in zip(tasks, weighed, strict=True) if word.argmax() == RouteAction.ANSWER.index]
    if not direct:
        return None
    direct = direct[:limit]
    await agent.answer(direct[0], route="answer")  # whatever is slow only the first time
    routed_s, with_tools_s = [], []
    for task in direct:
        routed_s.append((await agent.answer(task, route="answer")).seconds)
        began = time.perf_counter()
        (request,) = agent.scheduler.requests([agent.routing.decide(task, None)], do_sample=False)
        await request.run()
        with_tools_s.append(time.perf_counter() - began)
    return TimeSaved(len(direct), sum(routed_s) / len(direct), sum(with_tools_s) / len(direct))
