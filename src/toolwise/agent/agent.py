"""`Agent`: a trained model with its tools, and its router if it has one, that answers questions.

Each question is one rollout, with the deadlines, limits and isolation of training.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from toolwise.agent.events import AgentAnswer, AgentEvent, Emit, MessageEvents, RouteChosen, TextDelta
from toolwise.agent.inference import RouteChoice, TrainedRouter
from toolwise.agent.loader import AgentParts, load_parts
from toolwise.agent.question_options import check_question_options
from toolwise.agent.turn_inference import ROUTE_SEPARATOR, turn_probs
from toolwise.concurrency.deadlines import run_async
from toolwise.concurrency.tasks import spawn, wait_all
from toolwise.data.row_layout import with_system_prompt
from toolwise.envs.base import BaseEnv
from toolwise.errors import ConfigError, QuestionError, ToolwiseError
from toolwise.messages import Message, as_messages
from toolwise.rollout.request import AsyncRolloutRequest
from toolwise.rollout.turn_request import TurnRoutedRequest
from toolwise.routing.cost_cap import CappedEnv, Price
from toolwise.training.rollout_setup import build_scheduler
from toolwise.training.tasks import check_task_tools
from toolwise.types import RouteDecision, StopReason, Task
from toolwise.types.rollouts import OVER_BUDGET

NO_ROUTER = "this agent has no router, so it has no routes and no budget: leave them out"
Question = str | Sequence[Message | Mapping[str, Any]] | Task


class Agent:
    """Answers questions with the tools it was trained with. Loads no reference, critic or reward model.

    >>> agent = toolwise.load("runs/demo", documents=["Alder has 12 mills."])
    >>> agent.ask("How many mills does Alder have?").text
    """

    def __init__(self, parts: AgentParts | TrainedRouter) -> None:
        if isinstance(parts, TrainedRouter):
            parts = AgentParts(parts.config, parts.policy, parts.tools, parts)
        self.config, self.policy, self.tools = parts.config, parts.policy, parts.tools
        self._routing = parts.routing
        self.scheduler = build_scheduler(parts.config, parts.policy, dict(parts.tools))
        self._numbers = itertools.count(1)

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        overrides: Sequence[str] = (),
        trust_code: bool = False,
    ) -> Agent:
        """Loads an agent folder, a run, a checkpoint or a plain model. `tools` and `documents` replace its own. All
        tools the agent was trained with must be present; `tools=[]` explicitly answers without tools. An agent folder
        that brings code is loaded only with `trust_code`: the code runs with your permissions."""
        return cls(load_parts(source, tools=tools, documents=documents, overrides=overrides, trust_code=trust_code))

    @property
    def has_router(self) -> bool:
        return self._routing is not None

    @property
    def routing(self) -> TrainedRouter:
        if self._routing is None:
            raise ConfigError(NO_ROUTER)
        return self._routing

    @property
    def call_prices(self) -> dict[str, float]:
        """What one call of each tool costs, in the unit of the answers' cost."""
        price = self._price_of(Task(task_id="prices", prompt=[Message(role="user", content="")]), "")
        return {name: price({name: 1}) for name in self.tools}

    def check_budget(self, budget: float, max_cost: float | None = None) -> None:
        """Raise if there is no router, or one that cannot keep this budget."""
        question = Task(task_id="first", prompt=[Message(role="user", content="Hello")])
        run_async(self.routing.route_question(question, budget=budget, route=None, cap=max_cost, seed=0))

    def ask(self, question: Question, **options: Any) -> AgentAnswer:
        """Blocking version of `aask`; also works where an event loop is running, as in a notebook."""
        return run_async(self.aask(question, **options))

    async def aask(
        self,
        question: Question,
        *,
        budget: float | None = None,
        route: str = "auto",
        cap: float | None = None,
        do_sample: bool = False,
        seed: int = 0,
        emit: Emit | None = None,
        sampling: Mapping[str, Any] | None = None,
    ) -> AgentAnswer:
        """Answers one question: text, a conversation, or a task. Safe to call concurrently, from any event loop or
        thread.

        `budget` is the mean cost per question: the router uses the threshold calibrated for it, by default the one it
        was trained for, and gives a question the same route whenever it is asked. `cap` is the most this
        question may cost: calls beyond it are refused with an error that the model reads. `route` overrides the
        router. A question that does not fit the context is not answered: the answer's `problem` says so, and the
        rollout's `stop_reason` is then
        `prompt_too_long`. `emit` receives what happens, as in `stream`. `sampling` (`temperature`, `max_new_tokens`,
        `options`) replaces the agent's own, except where a route is answered by a server.
        """
        start = time.perf_counter()
        task = self._task(question)
        check_task_tools(task, dict(self.tools), env=self.config.env.name)
        check_question_options(budget=budget, route=route, cap=cap, seed=seed, do_sample=do_sample, sampling=sampling)
        choice = await self._choose(task, budget, route, cap, seed)
        request = self._request(task, choice, cap, do_sample)
        if sampling is not None:
            from toolwise.policies.local import with_sampling

            request.policy = with_sampling(request.policy, **sampling)
        if emit is not None:
            self._report(request, choice, emit)
        if choice.too_long is None:
            await request.run()
        else:
            request.stop(StopReason.PROMPT_TOO_LONG, choice.too_long)
            await request.finish()
        return self._answer(request, choice, start)

    answer = aask

    async def astream(self, question: Question, **options: Any) -> AsyncIterator[AgentEvent]:
        """The events of one answer as they happen; the last one is the `AgentAnswer`. Closing the iterator ends it."""
        events: asyncio.Queue[AgentEvent | None] = asyncio.Queue()
        work = spawn(self.aask(question, emit=events.put_nowait, **options))
        work.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event
            yield work.result()
        finally:
            work.cancel()
            await wait_all([work])

    def stream(self, question: Question, **options: Any) -> Iterator[AgentEvent]:
        """Blocking version of `astream`."""
        events: queue.SimpleQueue[AgentEvent | BaseException | None] = queue.SimpleQueue()
        started: queue.SimpleQueue[Any] = queue.SimpleQueue()

        async def work() -> None:
            started.put((asyncio.get_running_loop(), asyncio.current_task()))
            events.put(await self.aask(question, emit=events.put, **options))

        def run() -> None:
            working = work()
            try:
                run_async(working)
            except BaseException as fault:
                working.close()
                events.put(fault)
                started.put(None)  # read if `work` never ran
            events.put(None)

        thread = threading.Thread(target=run, name="toolwise-stream", daemon=True)
        thread.start()
        try:
            while (event := events.get()) is not None:
                if isinstance(event, BaseException):
                    raise event
                yield event
        finally:
            if thread.is_alive() and (running := started.get()) is not None:
                loop, task = running
                with suppress(RuntimeError):  # the loop has ended meanwhile
                    loop.call_soon_threadsafe(task.cancel)
            thread.join()

    async def _choose(self, task: Task, budget: float | None, route: str, cap: float | None, seed: int) -> RouteChoice:
        if self._routing is None:
            if budget is not None or route != "auto":
                raise QuestionError(NO_ROUTER, "route" if budget is None else "budget")
            return RouteChoice(RouteDecision(task, task.task_id, 1, seed, task.prompt))
        try:
            given = None if route == "auto" else self._routing.routes.parse(route)
        except ToolwiseError as fault:
            raise QuestionError(str(fault), "route") from None
        return await self._routing.route_question(task, budget=budget, route=given, cap=cap, seed=seed)

    def _request(self, task: Task, choice: RouteChoice, cap: float | None, do_sample: bool) -> AsyncRolloutRequest:
        (request,) = self.scheduler.requests([choice.decision], do_sample=do_sample)
        if cap is not None:
            left = max(
                0.0,
                cap - (self._routing.route_price(choice.route) if self._routing is not None and choice.route else 0.0),
            )
            request.env = cast("BaseEnv", CappedEnv(request.env, left, self._price_of(task, choice.route)))
        return request

    def _price_of(self, task: Task, route: str) -> Price:
        if self._routing is not None:
            return self._routing.price_of(task, route)
        prices = {name: tool.price for name, tool in self.tools.items()}
        unknown = max(prices.values(), default=1.0)
        return lambda calls: sum(prices.get(name, unknown) * count for name, count in calls.items())

    def _report(self, request: AsyncRolloutRequest, choice: RouteChoice, emit: Emit) -> None:
        from toolwise.policies.streaming import stream_text

        if choice.route:
            emit(RouteChosen(choice.route, choice.route_probs or {}))
        if isinstance(request, TurnRoutedRequest) and self._routing is not None:
            names = self._routing.routes.names
            request.on_route = lambda turn: emit(RouteChosen(turn.route, turn_probs(turn, names)))
        request.policy = stream_text(request.policy, lambda text: emit(TextDelta(text)))
        request.on_state = MessageEvents(emit, len(request.messages))

    def _answer(self, request: AsyncRolloutRequest, choice: RouteChoice, start: float) -> AgentAnswer:
        rollout, routing = request.to_rollout(), self._routing
        route, route_probs = choice.route, choice.route_probs or {}
        if routing is not None and rollout.turn_routes:
            route = ROUTE_SEPARATOR.join(turn.route for turn in rollout.turn_routes)
            route_probs = turn_probs(rollout.turn_routes[0], routing.routes.names)
        replies = [message.content or "" for message in rollout.messages if message.role == "assistant"]
        direct = routing is not None and choice.route == routing.routes.direct and not rollout.unanswered
        calibration = routing.calibration if routing is not None else None
        refused = Counter[str]() if routing is None else routing.refused_calls(rollout)
        return AgentAnswer(
            # An agent that never acted has no answer: an assistant message is then part of the prompt.
            text=replies[-1] if replies and not rollout.unanswered else "",
            route=route,
            route_probs=route_probs,
            cost=rollout.usage.cost if routing is None else routing.cost_of(rollout),
            calls=dict(Counter(rollout.usage.calls) - refused),
            refused=rollout.usage.failed_calls.get(OVER_BUDGET, 0) + refused.total(),
            seconds=time.perf_counter() - start,
            rollout=rollout,
            with_tools_s=calibration.with_tools_s if calibration is not None and direct else None,
        )

    def _task(self, question: Question) -> Task:
        if isinstance(question, Task):
            return question
        try:
            messages = [Message(role="user", content=question)] if isinstance(question, str) else as_messages(question)
        except ValueError as fault:
            problem = f"this {type(question).__name__} is no question ({_reason(fault)})"
            hint = 'give text, a list of messages {"role": …, "content": …}, or a Task'
            raise QuestionError(f"{problem}: {hint}", "messages") from None
        if not messages or (isinstance(question, str) and not question.strip()):
            raise QuestionError("the question is empty: give text or at least one message", "messages")
        prompt = with_system_prompt(messages, self.config.data.system_prompt)
        return Task(task_id=f"question-{next(self._numbers)}", prompt=prompt)


def _reason(fault: ValueError) -> str:
    """The first line of an error, or the first problem of a validation."""
    if not isinstance(fault, ValidationError):
        return str(fault).partition("\n")[0]
    first = fault.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


RoutedAgent = Agent
"""The name of an agent with a router in earlier versions."""
