"""Thousands of schedules of the rollout scheduler, each out of one seed, in virtual time: the invariants hold in all.

A seed that fails is played again alone, with all that happened, by
`SEED=1234 python -m pytest tests/simulation/test_schedules.py -k one_seed -s`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest
from sim_invariants import violations
from sim_stage import Mood
from sim_world import Plan, Play, play

from toolwise.types import StopReason

SEEDS, CHUNK = 300, 50
MANY, MANY_CHUNK = 10_000, 500
SEED = int(os.environ.get("SEED", "0"))


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_the_invariants_hold(first: int) -> None:
    _play_all(range(first, first + CHUNK))


@pytest.mark.long
@pytest.mark.parametrize("first", range(SEEDS, SEEDS + MANY, MANY_CHUNK))
def test_the_invariants_hold_for_many_more(first: int) -> None:
    _play_all(range(first, first + MANY_CHUNK))


def test_one_seed() -> None:
    plan = Plan.of(SEED)
    run = play(plan)
    print(plan)
    for at, who, what in run.stage.events:
        print(f"{at:12.6f}  {who:24} {what}")
    assert violations(run) == []


@pytest.mark.parametrize("seed", range(0, 600, 25))
def test_the_same_seed_is_the_same_run(seed: int) -> None:
    first, second = play(Plan.of(seed)), play(Plan.of(seed))
    assert first.stage.events == second.stage.events
    assert first.before_curtain == second.before_curtain


def test_one_world_in_many_schedules() -> None:
    plan = replace(Plan.of(0), kind="tools", sizes=(3, 3, 3), faults=0.1, cancels=(), jitter_s=0.0, deadline_s=60.0)
    runs = [play(plan, schedule=schedule) for schedule in range(20)]
    assert [violations(run) for run in runs] == [[]] * 20
    assert len({tuple(run.stage.events) for run in runs}) > 10


@pytest.mark.parametrize("lock_step", [False, True], ids=["free", "in step"])
def test_a_group_of_nobody_is_complete_at_once(lock_step: bool) -> None:
    plan = replace(Plan.of(0), sizes=(0, 2, 0), faults=0.0, cancels=(), listens="groups", lock_step=lock_step)
    run = play(plan)
    assert violations(run) == []
    assert sorted(len(group) for group in run.groups) == [0, 0, 2]


@pytest.mark.long
def test_the_seeds_reach_every_corner() -> None:
    """What no seed does, no invariant watches over."""
    moods: set[tuple[str, Mood]] = set()
    reasons: Counter[StopReason] = Counter()
    found: Counter[str] = Counter()
    for seed in range(300):
        run = play(Plan.of(seed))
        moods |= {(v.what, v.mood) for v in run.stage.visits}
        reasons.update(rollout.stop_reason for rollout in run.done)
        found["cancelled"] += run.cancelled_at is not None and run.result is None
        found["left behind"] += bool(run.left_behind)
        found["made late"] += _made_late(run)
        found["in step"] += run.plan.lock_step and bool(run.done)
    for verb in ("create", "execute", "calc_reward", "release", "get_action"):
        assert {mood for what, mood in moods if what == verb} >= set(Mood) - {Mood.DOWN}
    assert ("execute", Mood.DOWN) in moods
    assert set(reasons) == set(StopReason)
    assert min(reasons.values()) >= 5
    assert found["cancelled"] > 30
    assert found["left behind"] > 20
    assert found["made late"] > 5
    assert found["in step"] > 40


def _made_late(run: Play) -> bool:
    return any(v.what == "create" and v.asked_to_end is not None and v.raised is None for v in run.stage.visits)


def _play_all(seeds: Iterable[int]) -> None:
    for seed in seeds:
        try:
            found = violations(play(Plan.of(seed)))
        except Exception as fault:
            found = [f"{type(fault).__name__}: {fault}"]
        again = f"SEED={seed} python -m pytest tests/simulation/test_schedules.py -k one_seed -s"
        assert not found, f"seed {seed}: {found[0]}\nplay it again: {again}\n" + "\n".join(found[1:])
