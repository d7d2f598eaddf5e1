"""`RoutedAgent`: inference with a trained router. Chooses a route, conditions the prompt, runs one rollout.

A hard cap on the cost of one question refuses calls beyond it with an error that the model reads.
`time_saved` measures what direct answers save: the same prompts one at a time, routed and with all their tools.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from toolwise.agent.inference import TrainedRouter
from toolwise.agent.loader import load_router
from toolwise.concurrency.deadlines import run_async
from toolwise.envs.base import BaseEnv, Observation
from toolwise.errors import ConfigError, ContextFullError
from toolwise.messages import Message, ToolCall, as_messages
from toolwise.rollout.request import AsyncRolloutRequest
from toolwise.routing.cost import UNREADABLE
from toolwise.training.rollout_setup import build_scheduler
from toolwise.training.tasks import check_task_tools
from toolwise.types import Rollout, StopReason, Task

BUDGET_SPENT_MESSAGE = "error: the budget for tools is spent; answer with what you know"
OVER_BUDGET = "over_budget"
"""The key under which refused calls are counted in `failed_calls`."""

Price = Callable[[Mapping[str, int]], float]
"""Total cost of calls, given as tool name -> number of calls."""
Question = str | Sequence[Message | Mapping[str, Any]] | Task


@dataclass(frozen=True, slots=True)
class AgentAnswer:
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
        return None if self.with_tools_s is None else self.with_tools_s - self.seconds


class CappedEnv:
    """Wraps `inner` and refuses calls that would bring the cost above `cap`.

    Calls of one turn are checked in order, each with the accepted ones before it. A call that adds no cost, as the
    second one does if any number of calls costs the same, is always accepted. All but `step` is that of `inner`; tools
    stay in the prompt after the cap is reached, because changing it would invalidate the KV cache.
    """

    def __init__(self, inner: BaseEnv, cap: float, price: Price) -> None:
        self.inner, self.cap, self.price = inner, cap, price
        self._calls_made: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def step(self, action: Any) -> tuple[Observation, float | None, bool, dict[str, Any]]:
        calls = list(action.get("tool_calls") or ()) if isinstance(action, Mapping) else []
        accepted = [self._admit(call) for call in calls]
        if all(accepted):
            return await self.inner.step(action)
        observation: Observation = []
        reward, done, info = None, False, dict[str, Any]()
        if any(accepted):
            action = {**action, "tool_calls": list(itertools.compress(calls, accepted))}
            observation, reward, done, info = await self.inner.step(action)
        results = iter([] if isinstance(observation, str) else observation)
        messages = [
            next(results)
            if good
            else Message.unchecked("tool", BUDGET_SPENT_MESSAGE, tool_call_id=call.id, name=call.name or None)
            for call, good in zip(calls, accepted, strict=True)
        ]
        # Refused calls count as failed only: `calls` are those that were executed and paid for.
        failed = Counter(info.get("failed_calls") or {}) + Counter({OVER_BUDGET: accepted.count(False)})
        info = {**info, "is_action_valid": False, "failed_calls": dict(failed)}
        return [*messages, *results], reward, done, info

    def _admit(self, call: ToolCall) -> bool:
        calls = self._calls_made + Counter({call.name or UNREADABLE: 1})
        if self.price(calls) > max(self.cap, self.price(self._calls_made)) + 1e-9:
            return False
        self._calls_made = calls
        return True


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

        `budget` is the mean cost per question: the router uses the threshold calibrated for it, by default the one it
        was trained for, and gives a question the same route whenever it is asked. `cap` is the most this
        question may cost: calls beyond it are refused with an error that the model reads. `route` overrides the
        router. A question that does not fit the context is not answered: the rollout's `stop_reason` is then
        `prompt_too_long`.
        """
        start = time.perf_counter()
        task = self._task(question)
        check_task_tools(task, dict(self.routing.tools), env=self.routing.config.env.name)
        routes = self.routing.routes
        given_route = None if route == "auto" else routes.parse(route)
        too_long: ContextFullError | None = None
        try:
            (prediction,) = await self.routing.predict_in_engine([task])
            route_probs = {str(name): prob for name, prob in zip(routes.names, prediction.probs, strict=True)}
            chosen = given_route or self.routing.choose(prediction, task, budget=budget, seed=seed)
            chosen = self.routing.within_cap(chosen, prediction, cap, given=given_route is not None)
        except ContextFullError as full:
            # With a given route the conditioned prompt may be shorter and still fit.
            fallback = given_route or routes.direct or routes.names[0]
            route_probs, chosen, too_long = {}, fallback, None if given_route else full
        request = self._request(task, chosen, cap, do_sample, seed)
        if too_long is None:
            await request.run()
        else:
            request.stop(StopReason.PROMPT_TOO_LONG, str(too_long))
            await request.finish()
        rollout = request.to_rollout()
        replies = [message.content or "" for message in rollout.messages if message.role == "assistant"]
        calibration, direct = self.routing.calibration, chosen == routes.direct and not rollout.unanswered
        return AgentAnswer(
            # An agent that never acted has no answer: an assistant message is then part of the prompt.
            text=replies[-1] if replies and not rollout.unanswered else "",
            route=str(chosen),
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

    def _request(self, task: Task, route: str, cap: float | None, do_sample: bool, seed: int) -> AsyncRolloutRequest:
        (request,) = self.scheduler.requests([self.routing.decide(task, route, seed=seed)], do_sample=do_sample)
        if cap is not None:
            if not cap >= 0:
                raise ConfigError(f"cap is {cap}: give a number of at least 0")
            left = max(0.0, cap - self.routing.route_price(route))
            request.env = cast("BaseEnv", CappedEnv(request.env, left, self.routing.price_of(task)))
        return request

    def _task(self, question: Question) -> Task:
        if isinstance(question, Task):
            return question
        messages = [Message(role="user", content=question)] if isinstance(question, str) else as_messages(question)
        if not messages:
            raise ConfigError("the question is empty: give text or at least one message")
        return Task(task_id=f"question-{next(self._numbers)}", prompt=messages)


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


async def time_saved(agent: RoutedAgent, tasks: Sequence[Task], *, limit: int = 16) -> TimeSaved | None:
    """Measured on the first prompts that the router would answer directly; None if there are none."""
    pairs = zip(tasks, agent.routing.predict(tasks), strict=True)
    name = agent.routing.routes.direct
    if name is None:
        return None
    index = agent.routing.routes.index(name)
    direct = [task for task, prediction in pairs if prediction.argmax() == index][:limit]
    if not direct:
        return None
    await agent.answer(direct[0], route=name)  # warm up
    routed_s, with_tools_s = [], []
    for task in direct:
        routed_s.append((await agent.answer(task, route=name)).seconds)
        start = time.perf_counter()
        (request,) = agent.scheduler.requests([agent.routing.decide(task, None)], do_sample=False)
        await request.run()
        with_tools_s.append(time.perf_counter() - start)
    return TimeSaved(len(direct), sum(routed_s) / len(direct), sum(with_tools_s) / len(direct))
