"""The asynchronous training loop: a producer keeps episodes going, the learner takes groups as they finish.

    producer   admit ─► draw tasks ─► route ─► roll out ─► reward ─► queue          (the event loop and the engine)
    learner    queue ─► think ─► annotate ─► credit ─► update (in a thread) ─► publish ─► advance

Episodes go on across updates; only the engine pauses, for the copy of the weights. The queue bounds staleness by
admission: a group starts only if it will be learned from in time, and the learner waits for a slow group rather than
publish a version that would make it too old. `rollout.deadline_s` bounds that wait. While a validation runs, updates go
on and publishing waits (`hold_weights`).

With `deterministic = true` the schedule is fixed: a version is published when all groups under way are complete, so
that each batch comes from one version, `max_staleness` before the one that learns from it, and timing decides nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar, cast

from toolwise.concurrency.tasks import spawn, wait_all
from toolwise.errors import ToolwiseError
from toolwise.protocols import Metrics
from toolwise.rollout.queue import Delivery, Ticket
from toolwise.routing.pending import RemembersPrompts
from toolwise.training.evaluate import align_results, score
from toolwise.training.loop import (
    StepResult,
    counters,
    counters_since,
    gate_metrics,
    indices_by_prompt,
    max_refills,
    observe_scores,
    select_usable,
    step_result,
    think,
    update_actor,
    with_credit_of_router,
)
from toolwise.training.metrics import mean
from toolwise.training.run import Run
from toolwise.training.staleness import StepWaits, staleness_metrics
from toolwise.training.stored_groups import FinishedPrompt
from toolwise.training.ticket_book import OpenBatch
from toolwise.types import Rollout, RouteDecision, ScoredRollout

T = TypeVar("T")
Work = Callable[[Callable[[], Any]], Awaitable[Any]]


class AsyncLoop:
    """Trains `run` step by step, while rollouts for later steps are under way. `close` ends those."""

    def __init__(self, run: Run, *, work: Work | None = None) -> None:
        """`work` runs the learner's update without blocking the event loop; by default in a thread."""
        if run.tickets is None or run.weights is None:
            raise ToolwiseError('the run was not built for trainer.mode = "async"')
        self.run, self.book, self.weights = run, run.tickets, run.weights
        self._end_thread: Callable[[], None] = lambda: None
        if work is None:
            stream = run.weights.learner_stream()
            work, self._end_thread = stream.run_in_thread, stream.close
        self._work = work
        self._weights_in_use = asyncio.Lock()
        """Held while the router reads the engine's weights, and while they are replaced."""
        self._updating = asyncio.Lock()
        """Held from the start of a step's thoughts and update until its weights are published, or are known to be held
        back."""
        self._pinned = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._started = False

    async def train_step(self, run: Run, before_update: Callable[[], None] = lambda: None) -> StepResult:
        """`before_update` is called before any weight changes."""
        waits, counted = StepWaits(run), counters(run)
        self._start()
        with waits.learner():
            taken, scored, usable, counts = await self._collect()
        rolled_out = time.perf_counter()
        async with self._updating:
            thinking, thinking_metrics = await think(run, scored, usable)
            before_update()
            scored, usable = with_credit_of_router(run, scored, usable)
            version = run.learner.version
            credited, actor_metrics, estimator_metrics = await self._work(partial(update_actor, run, usable, thinking))
            if run.config.deterministic:
                await run.queue.settle(**self._next_batch())
            router_metrics, publish_s = await self._learn_and_publish(scored, [delivery.ticket for delivery in taken])
        counts |= waits.metrics(rolled_out) | {"async/publish_s": publish_s}
        counts |= staleness_metrics(scored, version, self.book.max_staleness)
        own = actor_metrics | thinking_metrics | counts | gate_metrics(run) | counters_since(run, counted)
        return step_result(scored, credited, own, estimator_metrics, router_metrics)

    async def _learn_and_publish(
        self, scored: Sequence[ScoredRollout], learned: Sequence[Ticket]
    ) -> tuple[Metrics, float]:
        """Train the router, which may share the actor's weights, and give the engine the new ones. If a user's router
        fails, the step counts all the same. Also returns the seconds of the second part."""
        run = self.run
        async with self._weights_in_use:
            try:
                metrics: Metrics = await self._work(partial(run.router.learn, scored))
            finally:
                published, publish = time.perf_counter(), not self._pinned
                if publish:
                    await self._publish()
                self.book.close(learned)
                observe_scores(run, scored)
                run.queue.advance(publish=publish)
                run.progress.step += 1
            return metrics, time.perf_counter() - published

    async def _publish(self) -> None:
        if self.run.config.router.trains_weights:
            await self.weights.publish(self.run.learner.version)

    @property
    def can_hold_weights(self) -> bool:
        """Whether the learner may go on while the engine keeps its weights: not where the schedule is fixed or nothing
        may be stale, nor beside a router, which reads the head that is being trained."""
        config = self.run.config
        routed = config.router.enable or bool(config.router.name)
        return self.book.max_staleness > 0 and not config.deterministic and not routed

    def hold_weights(self, work: Callable[[], Awaitable[T]]) -> asyncio.Task[T]:
        """From now on the engine keeps its weights, until the task, which runs `work`, has ended. Updates go on, at
        most `max_staleness` + 1 of them, as no group is admitted meanwhile that would become too old."""
        self._pinned = True
        return self._add(self._released_after(work))

    async def _released_after(self, work: Callable[[], Awaitable[T]]) -> T:
        try:
            return await work()
        finally:
            self._pinned = False
            await self._catch_up()  # also after an error: the learner may be waiting for groups

    async def _catch_up(self) -> None:
        """Publish the latest weights, unless an update under way does."""
        async with self._updating:
            if self.run.queue.published == self.run.queue.version:
                return
            async with self._weights_in_use:
                await self._publish()
            self.run.queue.publish()

    async def close(self) -> None:
        """Cancel what is under way. A checkpoint saved before holds its tickets."""
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await wait_all(list(self._tasks))
        self._end_thread()

    # --- learner

    async def _collect(
        self,
    ) -> tuple[list[Delivery[FinishedPrompt]], list[ScoredRollout], list[ScoredRollout], Metrics]:
        """Take a step's groups, and more of them if too many have no signal."""
        run, wanted = self.run, self.run.queue.per_update
        taken: list[Delivery[FinishedPrompt]] = []
        scored: list[ScoredRollout] = []
        usable: list[ScoredRollout] = []
        shares: list[float] = []
        dropped = prompts = 0
        for attempt in range(1 + max_refills(run)):
            count = self._size_of_batch(attempt)
            if attempt:
                run.queue.return_unused(wanted)
            deliveries = await run.queue.take(count, missing=wanted - count)
            batch = await self._score(deliveries)
            selected, share, n_dropped = select_usable(run, batch)
            taken += deliveries
            scored += batch
            usable += selected
            shares.append(share)
            dropped += n_dropped
            groups = {s.rollout.group_id for s in selected}
            prompts += sum(any(r.group_id in groups for r in d.group.rollouts) for d in deliveries)
            if prompts >= wanted:
                break
        counts = {"frac_zero_std": mean(shares), "groups/dropped": float(dropped), "groups/batches": float(len(shares))}
        return taken, scored, usable, counts

    async def _score(self, deliveries: Sequence[Delivery[FinishedPrompt]]) -> list[ScoredRollout]:
        rollouts = [rollout for delivery in deliveries for rollout in delivery.group.rollouts]
        if self._scores_batches:
            return await score(self.run, rollouts, step=self.run.progress.step)
        results = [result for delivery in deliveries for result in delivery.group.results or ()]
        return align_results(self.run, rollouts, results)

    def _size_of_batch(self, attempt: int) -> int:
        """Groups to take: where they are taken in order, those of a batch, which is short at the end of an epoch."""
        queue, batches = self.run.queue, self.book.open
        if queue.order == "finished":
            return queue.per_update
        return len(batches[attempt].tickets) if attempt < len(batches) else self.run.batches.next_size

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
            self._restore_pending(batch)
        for batch in self.book.open:  # of a checkpoint, or of a loop on this run that was closed
            if batch.unfinished:
                self._spawn(self._produce, batch)
        self._spawn(self._feed)

    def _spawn(self, work: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        self._add(self._guarded(work, *arguments))

    def _add(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = spawn(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guarded(self, work: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        """An error of a producer becomes the learner's."""
        try:
            await work(*arguments)
        except Exception as fault:
            self.run.queue.fail(fault)

    async def _feed(self) -> None:
        """Start a batch of tasks whenever as many groups may start."""
        run = self.run
        while True:
            tickets = await run.queue.admit_many(**self._next_batch())
            self._spawn(self._produce, self.book.draw(next(run.batches), tickets, run.queue.published))

    def _next_batch(self) -> dict[str, int]:
        """The next batch of tasks, as the queue counts it: where groups are taken in order, each batch is a step."""
        queue, count = self.run.queue, self.run.batches.next_size
        missing = 0 if queue.order == "finished" else queue.per_update - count
        return {"count": count, "missing": missing, "last_version": self.run.config.trainer.total_steps}

    async def _produce(self, batch: OpenBatch) -> None:
        """Roll out the groups of a batch whose tickets are open, and queue each prompt when it is complete."""
        run = self.run
        async with self._weights_in_use:
            decisions = run.router.decide(batch.tasks, run.config.rollout.n, batch.step, label=batch.label)
        prompts = list(indices_by_prompt(decisions).values())
        tickets = {
            index: (ticket, len(prompts[place]))
            for place, ticket in batch.unfinished.items()
            for index in prompts[place]
        }
        if isinstance(run.router, RemembersPrompts):  # of groups that were rolled out before a crash
            run.router.forget([decision.group_id for i, decision in enumerate(decisions) if i not in tickets])
        self._restore_pending(batch)
        await self._roll_out(decisions, tickets, batch.step)

    def _restore_pending(self, batch: OpenBatch) -> None:
        if isinstance(self.run.router, RemembersPrompts):
            for group in batch.finished.values():
                self.run.router.add_pending(group.pending)

    async def _roll_out(
        self, decisions: Sequence[RouteDecision], tickets: dict[int, tuple[Ticket, int]], step: int
    ) -> None:
        """`tickets`: index of a decision -> the ticket of its prompt, and how many decisions share it."""
        run, indices = self.run, sorted(tickets)
        collected: dict[Ticket, list[list[Rollout]]] = defaultdict(list)
        chosen = [decisions[index] for index in indices]
        groups = run.scheduler.groups(chosen, do_sample=run.config.rollout.do_sample, step=step)
        async with aclosing(cast("AsyncGenerator[list[Rollout], None]", groups)) as finished:
            async for group in finished:
                ticket, size = tickets[indices[group[0].batch_data_id]]
                collected[ticket].append(group)
                if len(collected[ticket]) == size:
                    parts = sorted(collected.pop(ticket), key=lambda part: part[0].batch_data_id)
                    self._spawn(self._finish, ticket, [rollout for part in parts for rollout in part], step)

    async def _finish(self, ticket: Ticket, rollouts: list[Rollout], step: int) -> None:
        run = self.run
        results = None if self._scores_batches else await run.scoring.evaluate(rollouts, step=step)
        groups = sorted({rollout.group_id for rollout in rollouts})
        pending = run.router.pending_of(groups) if isinstance(run.router, RemembersPrompts) else {}
        group = FinishedPrompt(rollouts, results, pending)
        self.book.finish(ticket, group)
        run.queue.put(ticket, group)
