"""Random schedules of asynchronous training: no token too old, each group learned from once, no deadlock.

A seed that fails is played again alone by
`SEED=1234 python -m pytest tests/simulation/test_async_schedules.py -k one_seed -s`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from sim_async import AsyncPlan, play_async

from toolwise.data.sampled_batches import SampledBatches
from toolwise.rollout.queue import RolloutQueue
from toolwise.training.async_loop import AsyncLoop
from toolwise.training.ticket_book import TicketBook

SEEDS, CHUNK = 200, 100
MANY, MANY_CHUNK = 10_000, 500
SEED = int(os.environ.get("SEED", "0"))


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_the_bounds_hold(first: int) -> None:
    _play_all(range(first, first + CHUNK))


@pytest.mark.long
@pytest.mark.parametrize("first", range(SEEDS, SEEDS + MANY, MANY_CHUNK))
def test_the_bounds_hold_for_many_more(first: int) -> None:
    _play_all(range(first, first + MANY_CHUNK))


def test_one_seed() -> None:
    plan = AsyncPlan.of(SEED)
    played = play_async(plan)
    print(plan, played, sep="\n")
    assert played.violations == []


SLOW = replace(
    AsyncPlan.of(0), staleness=2, batch=2, n=2, steps=6, tasks=6, tool_s=1.0, learn_s=1.0, swap_s=0.1, faults=0.0,
    equal=0.0, refills=0, crashes=(), save_every=1, breaks_at=None, fixed=False, short=False, slots=None, cancels=(),
    curriculum=False,
)  # fmt: skip


def test_updates_go_on_during_a_slow_validation_until_the_bound() -> None:
    """One begins after the first step. Three updates follow, on groups that were admitted before, and no fourth, whose
    groups would be three versions old; the next validation begins after the fifth step."""
    played = play_async(replace(SLOW, validate_s=10_000.0))
    assert played.violations == []
    assert played.beside == 4
    assert played.worst == 2


def test_a_validation_that_hangs_holds_up_the_run_and_nothing_else() -> None:
    """The process is stopped, with nothing left behind, and its successor trains to the end."""
    played = play_async(replace(SLOW, validate_s=1e9, crashes=(5_000.0,)))
    assert played.violations == []
    assert (played.lives, played.steps) == (2, 6)


def test_the_seeds_reach_the_bounds() -> None:
    """A bound that is never reached is never tried."""
    played = [play_async(AsyncPlan.of(seed)) for seed in range(60)]
    worst = {bound: max(p.worst for p in played if p.plan.staleness == bound) for bound in (0, 1, 2)}
    assert worst == {0: 0, 1: 1, 2: 2}
    assert sum(p.spans for p in played) > 10
    assert sum(p.reissued for p in played) > 10
    assert any(p.fault for p in played)
    assert sum(p.beside for p in played) > 10
    assert sum(p.cancelled for p in played) > 10
    assert sum(p.repeats for p in played) > 10
    full = [p for p in played if p.most_groups >= p.plan.batch * (1 + p.plan.staleness) > 1]
    assert len(full) > 5
    assert any(p.lives > 2 for p in played)


def _forget_one(book: TicketBook, *arguments: Any) -> list[Any]:
    batches = REISSUE(book, *arguments)
    for batch in batches[:1]:
        batch.tickets.popitem()
    return batches


def _admit_by_updates(queue: RolloutQueue[Any], *, publish: bool = True) -> None:
    ADVANCE(queue)


REISSUE, ADVANCE = TicketBook.reissue, RolloutQueue.advance
MUTATIONS: list[tuple[Any, str, Any]] = [
    (RolloutQueue, "_updates_left", lambda queue, ticket: 9),  # a slow group can be overtaken for ever
    (TicketBook, "reissue", lambda book, queue, tasks: []),  # what was under way is lost
    (TicketBook, "reissue", _forget_one),
    (RolloutQueue, "advance", _admit_by_updates),  # as if held-back weights were published
    (AsyncLoop, "hold_weights", lambda loop, work: asyncio.ensure_future(work())),  # weights change during a validation
    (SampledBatches, "observe", lambda batches, scored: None),  # a curriculum hears nothing
    (TicketBook, "close", lambda book, tickets: None),  # what was learned from is rolled out again
    (TicketBook, "state_dict", lambda book: {"next_step": 0, "refills": 0, "open": [], "per_update": None}),
]


@pytest.mark.long
@pytest.mark.parametrize(("part", "name", "mutation"), MUTATIONS)
def test_a_broken_part_is_noticed(part: Any, name: str, mutation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, name, mutation)
    with pytest.raises(AssertionError, match="play it again"):
        _play_all(range(SEEDS))


def _play_all(seeds: Iterable[int]) -> None:
    for seed in seeds:
        try:
            found = play_async(AsyncPlan.of(seed)).violations
        except Exception as fault:
            found = [f"{type(fault).__name__}: {fault}"]
        again = f"SEED={seed} python -m pytest tests/simulation/test_async_schedules.py -k one_seed -s"
        assert not found, f"seed {seed}: {found[0]}\nplay it again: {again}\n" + "\n".join(found[1:])
