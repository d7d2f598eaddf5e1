"""The simulation finds bugs: each planted one breaks the invariant that is meant for it, and soon."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from sim_invariants import violations
from sim_mutations import QUEUE_MUTATIONS, ROLLOUT_MUTATIONS, Plant
from sim_queue import QueuePlan, play_queue
from sim_world import Plan, play

SEEDS = 300


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # some bugs leave coroutines behind
@pytest.mark.parametrize("plant", ROLLOUT_MUTATIONS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_in_the_rollouts_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert _is_found(ROLLOUT_MUTATIONS[plant], lambda seed: violations(play(Plan.of(seed))))


@pytest.mark.parametrize("kind", QUEUE_MUTATIONS, ids=lambda kind: kind.__name__)
def test_a_planted_bug_in_the_queue_is_found(kind: Any) -> None:
    assert _is_found(QUEUE_MUTATIONS[kind], lambda seed: play_queue(QueuePlan.of(seed), kind).violations)


def _is_found(words: str, told_by: Callable[[int], list[str]]) -> bool:
    for seed in range(SEEDS):
        try:
            told = told_by(seed)
        except Exception as fault:  # a deadlock, or a crash of the run itself
            told = [f"{type(fault).__name__}: {fault}"]
        if any(re.search(words, line) for line in told):
            return True
    return False
