"""The asynchronous training loop: a producer keeps episodes going, the learner takes groups as they finish.

    producer   admit ─► draw tasks ─► route ─► roll out ─► reward ─► queue          (the event loop and the engine)
    learner    queue ─► think ─► annotate ─► credit ─► update (in a thread) ─► publish ─► advance

Episodes go on across updates; only the engine pauses, for the copy of the weights. The queue bounds staleness by
admission: a group starts only if it will be learned from in time, and the learner waits for a slow group rather than
publish a version that would make it too old. `rollout.deadline_s` bounds that wait.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from toolwise.concurrency.tasks import spawn, wait_all
from toolwise.errors import ToolwiseError
from toolwise.protocols import Metrics
from toolwise.rollout.queue import Delivery, Ticket
from toolwise.training.evaluate import align_results, score
from toolwise.training.loop import (
    StepResult,
    counters,
    counters_since,
    indices_by_prompt,
    max_refills,
    select_usable,
    step_result,
    think,
    update_actor,
    with_credit_of_router,
)
from toolwise.training.metrics import mean
from toolwise.training.run import Run
from toolwise.training.staleness import StepWaits, staleness_metrics
from toolwise.training.ticket_book import OpenBatch
from toolwise.types import EvaluateResult, Rollout, RouteDecision, ScoredRollout


@dataclass(frozen=True, slots=True)
class FinishedPrompt:
    """All rollouts of one prompt, with their rewards unless the learner computes those."""

    rollouts: list[Rollout]
    results: list[EvaluateResult] | None


Work = Callable[[Callable[[], Any]], Awaitable[Any]]


class AsyncLoop:
    """Trains `run` step by step, while rollouts for later steps are under way. `close` ends those."""

    def __init__(self, run: Run, *, work: Work = asyncio.to_thread) -> None:
        """`work` runs the learner's update without blocking the event loop."""
        if run.tickets is None or run.weights is None:
            raise ToolwiseError('the run was not built for trainer.mode = "async"')
        self.run, self.book, self.weights = run, run.tickets, run.weights
        self._work = work
        self._weights_in_use = asyncio.Lock()
        """Held while the router reads the engine's weights, and while they are replaced."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = False

    async def train_step(self, run: Run, before_update: Callable[[], None] = lambda: None) -> StepResult:
        """`before_update` is called before any weight changes."""
        waits, counted = StepWaits(run), counters(run)
        self._start()
        with waits.learner():
            taken, scored, usable, counts = await self._collect()
        rolled_out = time.perf_counter()
        thinking, thinking_metrics = await think(run, scored, usable)
        before_update()
        scored, usable = with_credit_of_router(run, scored, usable)
        version = run.learner.version
        credited, actor_metrics, estimator_metrics = await self._work(partial(update_actor, run, usable, thinking))
        published = time.perf_counter()
        async with self._weights_in_use:
            await self.weights.publish(run.learner.version)
        publish_s = time.perf_counter() - published
        self.book.close([delivery.ticket for delivery in taken])
        run.queue.advance()
        run.progress.step += 1
        router_metrics = run.router.learn(scored)  # before the producer asks it again: nothing is awaited until then
        counts |= waits.metrics(rolled_out) | {"async/publish_s": publish_s}
        counts |= staleness_metrics(scored, version, self.book.max_staleness)
        own = actor_metrics | thinking_metrics | counts | counters_since(run, counted)
        return step_result(scored, credited, own, estimator_metrics, router_metrics)

    async def close(self) -> None:
        """Cancel what is under way. A checkpoint saved before holds its tickets."""
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await wait_all(list(self._tasks))

    # --- learner

    async def _collect(
        self,
    ) -> tuple[list[Delivery[FinishedPrompt]], list[ScoredRollout], list[ScoredRollout], Metrics]:
        """Take a step's groups, and more of them if too many have no signal."""
        run, count = self.run, self.run.queue.per_update
        taken: list[Delivery[FinishedPrompt]] = []
        scored: list[ScoredRollout] = []
        usable: list[ScoredRollout] = []
        shares: list[float] = []
        dropped = prompts = 0
        for attempt in range(1 + max_refills(run)):
            if attempt:
                run.queue.return_unused(count)
            deliveries = await run.queue.take(count)
            batch = await self._score(deliveries)
            selected, share, n_dropped = select_usable(run, batch)
            taken += deliveries
            scored += batch
            usable += selected
            shares.append(share)
            dropped += n_dropped
            groups = {s.rollout.group_id for s in selected}
            prompts += sum(any(r.group_id in groups for r in d.group.rollouts) for d in deliveries)
            if prompts >= count:
                break
        counts = {"frac_zero_std": mean(shares), "groups/dropped": float(dropped), "groups/batches": float(len(shares))}
        return taken, scored, usable, counts

    async def _score(self, deliveries: Sequence[Delivery[FinishedPrompt]]) -> list[ScoredRollout]:
        rollouts = [rollout for delivery in deliveries for rollout in delivery.group.rollouts]
        if self._scores_batches:
            return await score(self.run, rollouts, step=self.run.progress.step)
        results = [result for delivery in deliveries for result in delivery.group.results or ()]
        return align_results(self.run, rollouts, results)

    @property
    def _scores_batches(self) -> bool:
        """Whether a step's rollouts are scored together, as without staleness, and not each group when it finishes."""
        return self.book.max_staleness == 0

    # --- producer

    def _start(self) -> None:
        if self._started:
            return
        self._started = True
        for batch in self.book.reissue(self.run.queue, self.run.batches.tasks):
            self._spawn(self._produce, batch)
        self._spawn(self._feed)

    def _spawn(self, work: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        task = spawn(self._guarded(work, *arguments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        """An error of a producer becomes the learner's."""
        try:
            await work(*arguments)
        except Exception as fault:
            self.run.queue.fail(fault)

    async def _feed(self) -> None:
        """Start a batch of tasks whenever as many groups may start."""
        run, count = self.run, self.run.queue.per_update
        while True:
            tickets = await run.queue.admit_many(count, last_version=run.config.trainer.total_steps)
            self._spawn(self._produce, self.book.draw(next(run.batches), tickets, run.queue.version))

    async def _produce(self, batch: OpenBatch) -> None:
        """Roll out the groups of a batch whose tickets are open, and queue each prompt when it is complete."""
        run = self.run
        async with self._weights_in_use:
            decisions = run.router.decide(batch.tasks, run.config.rollout.n, batch.step, label=batch.label)
        prompts = list(indices_by_prompt(decisions).values())
        tickets = {
            index: (ticket, len(prompts[place])) for place, ticket in batch.tickets.items() for index in prompts[place]
        }
        await self._roll_out(decisions, tickets, batch.step)

    async def _roll_out(
        self, decisions: Sequence[RouteDecision], tickets: dict[int, tuple[Ticket, int]], step: int
    ) -> None:
        """`tickets`: index of a decision -> the ticket of its prompt, and how many decisions share it."""
        run, indices = self.run, sorted(tickets)
        collected: dict[Ticket, list[list[Rollout]]] = defaultdict(list)
        chosen = [decisions[index] for index in indices]
        groups = run.scheduler.groups(chosen, do_sample=run.config.rollout.do_sample)
        async with aclosing(cast("AsyncGenerator[list[Rollout], None]", groups)) as finished:
            async for group in finished:
                ticket, size = tickets[indices[group[0].batch_data_id]]
                collected[ticket].append(group)
                if len(collected[ticket]) == size:
                    parts = sorted(collected.pop(ticket), key=lambda part: part[0].batch_data_id)
                    self._spawn(self._finish, ticket, [rollout for part in parts for rollout in part], step)

    async def _finish(self, ticket: Ticket, rollouts: list[Rollout], step: int) -> None:
        results = None if self._scores_batches else await self.run.scoring.evaluate(rollouts, step=step)
        self.run.queue.put(ticket, FinishedPrompt(rollouts, results))
