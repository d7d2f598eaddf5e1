"""`RoutedAgent`: the trained router at work. Route, conditioned prompt, one rollout with real tools."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from toolwise.agent.inference import TrainedRouter
from toolwise.agent.loader import load_router
from toolwise.agent.spending_cap import OVER_BUDGET, CappedEnv
from toolwise.concurrency import deadlines
from toolwise.errors import ConfigError, ContextFullError
from toolwise.messages import Message, as_messages
from toolwise.rollout.request import AsyncRolloutRequest
from toolwise.routing.actions import ROUTES, RouteAction
from toolwise.training.run import build_scheduler
from toolwise.training.tasks import check_task_tools
from toolwise.types import Rollout, StopReason, Task

Question = str | Sequence[Message | Mapping[str, Any]] | Task


@dataclass(frozen=True, slots=True)
class AgentAnswer:
    """What came of one question."""

    text: str
    """The agent's last words."""
    route: str
    route_probs: Mapping[str, float]
    """route -> how likely the router thought it; empty where the question is too long for the router to read"""
    cost: float
    """Of the calls that were served, in the unit of the budget."""
    calls: Mapping[str, int]
    refused: int
    """Calls beyond the cap."""
    seconds: float
    """Routing included."""
    rollout: Rollout
    with_tools_s: float | None = None
    """Of a question that was answered directly: what such questions took with all tools, where that was measured."""

    @property
    def saved_s(self) -> float | None:
        """Seconds that answering directly saved."""
        return None if self.with_tools_s is None else self.with_tools_s - self.seconds


class RoutedAgent:
    """Answers questions as its router decides. No reference, critic or reward model is loaded.

    >>> agent = RoutedAgent.load("runs/demo", documents=["Alder has 12 mills."])
    >>> agent.ask("How many mills does Alder have?", budget=0.3).text
    """

    def __init__(self, routing: TrainedRouter) -> None:
        self.routing = routing
        self.scheduler = build_scheduler(routing.config, routing.policy, dict(routing.tools))
        self._numbers = itertools.count(1)

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        overrides: Sequence[str] = (),
    ) -> RoutedAgent:
        """From a run, a checkpoint or an exported folder; `tools` and `documents` take the place of the run's own. All
        tools that it was trained with must be there; `tools=[]` answers without any, on purpose."""
        return cls(load_router(source, tools=tools, documents=documents, overrides=overrides))

    async def answer(
        self,
        question: Question,
        *,
        budget: float | None = None,
        route: str = "auto",
        cap: float | None = None,
        do_sample: bool = False,
        seed: int = 0,
    ) -> AgentAnswer:
        """One question, routed and answered. Any number may be asked at once, from any event loop or thread.

        `budget` is what questions may cost on average: the router is held to it by the threshold that was calibrated
        for it. `cap` is what this one may cost at most: calls beyond it are refused, and the model is told. `route`
        takes the choice out of the router's hands. A question too long to be read is not answered: the rollout's
        `stop_reason` is then `prompt_too_long`.
        """
        began = time.perf_counter()
        task = self._task(question)
        check_task_tools(task, dict(self.routing.tools), env=self.routing.config.env.name)
        named = None if route == "auto" else RouteAction.parse(route)
        too_long: ContextFullError | None = None
        try:
            (weighed,) = await self.routing.predict_in_engine([task])
            route_probs = {name.value: share for name, share in zip(ROUTES, weighed.probs, strict=True)}
            chosen = named or self.routing.choose(weighed, task, budget=budget, seed=seed)
        except ContextFullError as full:
            # Under a route that was named, the prompt may be a shorter one.
            route_probs, chosen, too_long = {}, named or RouteAction.ANSWER, None if named else full
        request = self._request(task, chosen, cap, do_sample, seed)
        if too_long is None:
            await request.run()
        else:
            request.stop(StopReason.PROMPT_TOO_LONG, str(too_long))
            await request.finish()
        rollout = request.to_rollout()
        known, direct = self.routing.calibration, chosen is RouteAction.ANSWER and not rollout.unanswered
        return AgentAnswer(
            text=_final_text(rollout),
            route=chosen.value,
            route_probs=route_probs,
            cost=self.routing.cost_of(rollout),
            calls=dict(rollout.usage.calls),
            refused=rollout.usage.failed_calls.get(OVER_BUDGET, 0),
            seconds=time.perf_counter() - began,
            rollout=rollout,
            with_tools_s=known.with_tools_s if known is not None and direct else None,
        )

    def ask(self, question: Question, **how: Any) -> AgentAnswer:
        """`answer` for those who do not await, from a notebook too."""
        work = partial(deadlines.run, self.answer(question, **how))
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return work()
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(work).result()

    def _request(
        self, task: Task, route: RouteAction, cap: float | None, do_sample: bool, seed: int
    ) -> AsyncRolloutRequest:
        (request,) = self.scheduler.requests([self.routing.decide(task, route, seed=seed)], do_sample=do_sample)
        if cap is not None:
            if not cap >= 0:
                raise ConfigError(f"the cap is {cap}: give a number from 0 up")
            families = self.routing.families_of(task)
            request.env = CappedEnv(request.env, cap, lambda calls: self.routing.price_of(calls, families))
        return request

    def _task(self, question: Question) -> Task:
        if isinstance(question, Task):
            return question
        messages = [Message(role="user", content=question)] if isinstance(question, str) else as_messages(question)
        if not messages:
            raise ConfigError("the question is empty: give a text, or at least one message")
        return Task(task_id=f"question-{next(self._numbers)}", prompt=messages)


def _final_text(rollout: Rollout) -> str:
    """Nothing where the agent never acted: an assistant message is then one of the prompt's."""
    said = [message.content or "" for message in rollout.messages if message.role == "assistant"]
    return said[-1] if said and not rollout.unanswered else ""
