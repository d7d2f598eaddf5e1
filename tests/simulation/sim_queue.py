"""Producers, a queue and a trainer out of one seed; groups are made up, or come from a real scheduler."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from toolwise.messages import Message
from toolwise.policies.scripted import ScriptedPolicy
from toolwise.rollout.queue import Delivery, Order, RolloutQueue, Ticket
from toolwise.rollout.scheduler import RolloutScheduler
from toolwise.testing.virtual_time import simulate
from toolwise.types import RouteDecision, Task

MakeQueue = Callable[..., RolloutQueue[Any]]


@dataclass(frozen=True)
class QueuePlan:
    seed: int
    per_update: int
    capacity: int | None
    max_staleness: int
    order: Order
    producers: int
    at_once: int
    """Groups that one producer makes at the same time."""
    updates: int
    make_s: float
    learn_s: float
    gives_back: float
    fails_at: int | None
    """The group at which a producer breaks down for good."""
    in_parts: bool
    """The trainer takes an update's groups one by one, and not all in one go."""
    real: bool
    """Groups are rollouts of a real scheduler."""
    shuffled: bool

    @classmethod
    def of(cls, seed: int) -> QueuePlan:
        chance = random.Random(f"queue {seed}")
        per_update, in_parts = chance.randint(1, 4), chance.random() < 0.4
        smallest = 1 if in_parts else per_update
        return cls(
            seed=seed,
            per_update=per_update,
            capacity=chance.choice((None, smallest, smallest + 1, 2 * per_update + 1)),
            max_staleness=chance.randint(0, 3),
            order=chance.choice(("admitted", "finished")),
            producers=chance.randint(1, 3),
            at_once=chance.randint(1, 4),
            updates=chance.randint(2, 8),
            make_s=chance.choice((0.0, 0.1, 1.0)),
            learn_s=chance.choice((0.0, 0.1, 1.0, 5.0)),
            gives_back=chance.choice((0.0, 0.0, 0.3)),
            fails_at=chance.choice((None, None, None, None, chance.randint(0, 12))),
            in_parts=in_parts,
            real=chance.random() < 0.3,
            shuffled=chance.random() < 0.8,
        )


@dataclass
class QueueRun:
    """What the producers put in and the trainer got out, by their own count and not by the queue's."""

    plan: QueuePlan
    queue: RolloutQueue[Any]
    events: list[tuple[float, str]] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    version: int = 0
    admitted: dict[int, int] = field(default_factory=dict)
    """ticket -> version of the policy when it was given"""
    in_progress: set[int] = field(default_factory=set)
    waiting: dict[int, Any] = field(default_factory=dict)
    staleness: dict[int, int] = field(default_factory=dict)
    taken: list[int] = field(default_factory=list)
    heard: BaseException | None = None

    def note(self, what: str) -> None:
        self.events.append((asyncio.get_running_loop().time(), what))
        bound = self.plan.capacity or self.plan.per_update * (1 + self.plan.max_staleness)
        if len(self.in_progress) + len(self.waiting) > bound:
            self.broken(f"{len(self.in_progress)} under way and {len(self.waiting)} waiting; room for {bound}")

    def broken(self, words: str) -> None:
        self.violations.append(f"at {asyncio.get_running_loop().time():g} s: {words}")


class BrokenDownError(Exception):
    """A producer's own fault."""


def play_queue(plan: QueuePlan, make: MakeQueue = RolloutQueue) -> QueueRun:
    return simulate(_play(plan, make), seed=plan.seed if plan.shuffled else None)


async def _play(plan: QueuePlan, make: MakeQueue) -> QueueRun:
    queue = make(per_update=plan.per_update, capacity=plan.capacity, max_staleness=plan.max_staleness, order=plan.order)
    run = QueueRun(plan, queue)
    producers = [asyncio.create_task(_produce(run)) for _ in range(plan.producers * plan.at_once)]
    try:
        await _train(run)
    except BrokenDownError as fault:
        run.heard = fault
    finally:
        for producer in producers:
            producer.cancel()
        await asyncio.wait(producers)
    _settle(run)
    return run


async def _produce(run: QueueRun) -> None:
    while True:
        ticket = await run.queue.admit()
        if ticket.number in run.admitted:
            run.broken(f"ticket {ticket.number} given twice")
        if ticket.version != run.version:
            run.broken(f"ticket {ticket.number} says version {ticket.version} at version {run.version}")
        run.admitted[ticket.number] = run.version
        run.in_progress.add(ticket.number)
        run.note(f"admitted {ticket.number}")
        chance = random.Random(f"{run.plan.seed}/{ticket.number}")
        group = await _make_group(run.plan, ticket, chance)
        if ticket.number == run.plan.fails_at:
            run.note("a producer breaks down")
            run.queue.fail(BrokenDownError("out of tasks"))
            return
        run.in_progress.remove(ticket.number)
        run.waiting[ticket.number] = group
        run.queue.put(ticket, group)
        run.note(f"put {ticket.number}")


async def _make_group(plan: QueuePlan, ticket: Ticket, chance: random.Random) -> Any:
    await asyncio.sleep(round(chance.expovariate(1.0) * plan.make_s, 3))
    if not plan.real:
        return f"group {ticket.number}"
    task = Task(task_id=f"t{ticket.number}", prompt=[Message(role="user", content="?")])
    decision = RouteDecision(task, f"group {ticket.number}", 2, ticket.number, task.prompt)
    scheduler = RolloutScheduler(ScriptedPolicy(["an answer"]), {})
    async for group in scheduler.groups([decision]):
        return group
    raise AssertionError("no group at all")


async def _train(run: QueueRun) -> None:
    plan = run.plan
    for update in range(plan.updates):
        chance = random.Random(f"{plan.seed}/update {update}")
        wanted = plan.per_update
        while wanted:
            taken: list[Delivery[Any]] = []
            for count in [1] * wanted if plan.in_parts else [wanted]:
                got = await run.queue.take(count)
                if len(got) != count:
                    run.broken(f"asked for {count} groups and got {len(got)}")
                taken += got
                _receive(run, got)
            wanted = sum(chance.random() < plan.gives_back for _ in taken)
            if wanted:
                run.note(f"gives back {wanted}")
                run.queue.return_unused(wanted)
        await asyncio.sleep(round(chance.expovariate(1.0) * plan.learn_s, 3))
        run.version += 1
        run.queue.advance()
        run.note(f"version {run.version}")


def _receive(run: QueueRun, deliveries: list[Delivery[Any]]) -> None:
    for delivery in deliveries:
        number = delivery.ticket.number
        if number not in run.waiting:
            run.broken(f"group {number} was taken, and was not there")
            continue
        if run.waiting.pop(number) is not delivery.group:
            run.broken(f"group {number} is another's")
        stale = run.staleness[number] = run.version - run.admitted[number]
        if stale > run.plan.max_staleness or delivery.staleness != stale:
            run.broken(f"group {number} is {stale} updates old, says {delivery.staleness}")
        older = [n for n in run.admitted if n < number and n not in run.taken]
        if run.plan.order == "admitted" and older:
            run.broken(f"group {number} was taken before {older}")
        run.taken.append(number)
    run.note(f"took {[d.ticket.number for d in deliveries]}")


def _settle(run: QueueRun) -> None:
    """Whatever was admitted is somewhere, once."""
    if run.queue.waiting != len(run.waiting):
        run.broken(f"{run.queue.waiting} groups wait in the queue, and {len(run.waiting)} were put and not taken")
    places = [*run.taken, *run.waiting, *run.in_progress]
    if sorted(places) != sorted(run.admitted):
        run.broken(f"admitted {sorted(run.admitted)}, found {sorted(places)}")
    if run.heard is None and run.version != run.plan.updates:
        run.broken(f"{run.version} of {run.plan.updates} updates, and nobody said why")
    if run.heard is not None and run.plan.fails_at not in run.admitted:
        run.broken("the trainer heard of a fault that nobody had")
