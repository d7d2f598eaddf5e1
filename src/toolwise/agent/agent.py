"""`RoutedAgent`: inference with a trained router. Chooses a route, conditions the prompt, runs one rollout."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolwise.agent.inference import TrainedRouter
from toolwise.agent.loader import load_router
from toolwise.agent.spending_cap import OVER_BUDGET, CappedEnv
from toolwise.concurrency.deadlines import run_async
from toolwise.errors import ConfigError, ContextFullError
from toolwise.messages import Message, as_messages
from toolwise.rollout.request import AsyncRolloutRequest
from toolwise.routing.actions import ROUTES, RouteAction
from toolwise.training.rollout_setup import build_scheduler
from toolwise.training.tasks import check_task_tools
from toolwise.types import Rollout, StopReason, Task

Question = str | Sequence[Message | Mapping[str, Any]] | Task


@dataclass(frozen=True, slots=True)
class AgentAnswer:
    """The result of one question."""

    text: str
    """The agent's last message."""
    route: str
    route_probs: Mapping[str, float]
    """route -> probability; empty if the question is too long for the router"""
    cost: float
    """Cost of the calls that were executed, in the unit of the budget."""
    calls: Mapping[str, int]
    refused: int
    """Calls refused because of the cap."""
    seconds: float
    """Wall time, including routing."""
    rollout: Rollout
    with_tools_s: float | None = None
    """For a direct answer: the calibrated mean time of such questions with all tools, if it was measured."""

    @property
    def saved_s(self) -> float | None:
        """Seconds saved by answering directly."""
        return None if self.with_tools_s is None else self.with_tools_s - self.seconds


class RoutedAgent:
    """Answers questions along the routes that its router chooses. Loads no reference, critic or reward model.

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
        """Loads a run, a checkpoint or an exported folder. `tools` and `documents` replace the run's. All tools the
        agent was trained with must be present; `tools=[]` explicitly answers without tools."""
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
        """Routes and answers one question. Safe to call concurrently, from any event loop or thread.

        `budget` is the mean cost per question: the router uses the threshold calibrated for it. `cap` is the most this
        question may cost: calls beyond it are refused with an error that the model reads. `route` overrides the
        router. A question that does not fit the context is not answered: the rollout's `stop_reason` is then
        `prompt_too_long`.
        """
        start = time.perf_counter()
        task = self._task(question)
        check_task_tools(task, dict(self.routing.tools), env=self.routing.config.env.name)
        given_route = None if route == "auto" else RouteAction.parse(route)
        too_long: ContextFullError | None = None
        try:
            (prediction,) = await self.routing.predict_in_engine([task])
            route_probs = {name.value: prob for name, prob in zip(ROUTES, prediction.probs, strict=True)}
            chosen = given_route or self.routing.choose(prediction, task, budget=budget, seed=seed)
        except ContextFullError as full:
            # With a given route the conditioned prompt may be shorter and still fit.
            route_probs, chosen, too_long = {}, given_route or RouteAction.ANSWER, None if given_route else full
        request = self._request(task, chosen, cap, do_sample, seed)
        if too_long is None:
            await request.run()
        else:
            request.stop(StopReason.PROMPT_TOO_LONG, str(too_long))
            await request.finish()
        rollout = request.to_rollout()
        calibration, direct = self.routing.calibration, chosen is RouteAction.ANSWER and not rollout.unanswered
        return AgentAnswer(
            text=_final_text(rollout),
            route=chosen.value,
            route_probs=route_probs,
            cost=self.routing.cost_of(rollout),
            calls=dict(rollout.usage.calls),
            refused=rollout.usage.failed_calls.get(OVER_BUDGET, 0),
            seconds=time.perf_counter() - start,
            rollout=rollout,
            with_tools_s=calibration.with_tools_s if calibration is not None and direct else None,
        )

    def ask(self, question: Question, **options: Any) -> AgentAnswer:
        """Blocking version of `answer`; also works where an event loop is running, as in a notebook."""
        return run_async(self.answer(question, **options))

    def _request(
        self, task: Task, route: RouteAction, cap: float | None, do_sample: bool, seed: int
    ) -> AsyncRolloutRequest:
        (request,) = self.scheduler.requests([self.routing.decide(task, route, seed=seed)], do_sample=do_sample)
        if cap is not None:
            if not cap >= 0:
                raise ConfigError(f"cap is {cap}: give a number of at least 0")
            families = self.routing.families_of(task)
            request.env = CappedEnv(request.env, cap, lambda calls: self.routing.price_of(calls, families))
        return request

    def _task(self, question: Question) -> Task:
        if isinstance(question, Task):
            return question
        messages = [Message(role="user", content=question)] if isinstance(question, str) else as_messages(question)
        if not messages:
            raise ConfigError("the question is empty: give text or at least one message")
        return Task(task_id=f"question-{next(self._numbers)}", prompt=messages)


def _final_text(rollout: Rollout) -> str:
    """Empty if the agent never acted: an assistant message is then part of the prompt."""
    replies = [message.content or "" for message in rollout.messages if message.role == "assistant"]
    return replies[-1] if replies and not rollout.unanswered else ""
