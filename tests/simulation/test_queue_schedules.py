"""Thousands of schedules of producers, the queue and a trainer: nothing lost, nothing twice, nothing too old.

A seed that fails is played again alone, with all that happened, by
`SEED=1234 python -m pytest tests/simulation/test_queue_schedules.py -k one_seed -s`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest
from sim_queue import QueuePlan, play_queue

SEEDS, CHUNK = 600, 100
MANY, MANY_CHUNK = 10_000, 1000
SEED = int(os.environ.get("SEED", "0"))


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_the_bounds_hold(first: int) -> None:
    _play_all(range(first, first + CHUNK))


@pytest.mark.long
@pytest.mark.parametrize("first", range(SEEDS, SEEDS + MANY, MANY_CHUNK))
def test_the_bounds_hold_for_many_more(first: int) -> None:
    _play_all(range(first, first + MANY_CHUNK))


def test_one_seed() -> None:
    plan = QueuePlan.of(SEED)
    run = play_queue(plan)
    print(plan)
    for at, what in run.events:
        print(f"{at:12.6f}  {what}")
    assert run.violations == []


@pytest.mark.parametrize("seed", range(0, 600, 50))
def test_the_same_seed_is_the_same_run(seed: int) -> None:
    assert play_queue(QueuePlan.of(seed)).events == play_queue(QueuePlan.of(seed)).events


@pytest.mark.long
def test_the_seeds_reach_the_bounds() -> None:
    """A bound that is never reached is never tried."""
    oldest: dict[int, int] = {}
    for seed in range(300):
        run = play_queue(QueuePlan.of(seed))
        assert run.heard is None or run.plan.fails_at is not None
        found = max((run.staleness[number] for number in run.taken), default=0)
        bound = run.plan.max_staleness
        oldest[bound] = max(oldest.get(bound, 0), found)
    assert oldest == {0: 0, 1: 1, 2: 2, 3: 3}


def _play_all(seeds: Iterable[int]) -> None:
    for seed in seeds:
        try:
            found = play_queue(QueuePlan.of(seed)).violations
        except Exception as fault:
            found = [f"{type(fault).__name__}: {fault}"]
        again = f"SEED={seed} python -m pytest tests/simulation/test_queue_schedules.py -k one_seed -s"
        assert not found, f"seed {seed}: {found[0]}\nplay it again: {again}\n" + "\n".join(found[1:])
