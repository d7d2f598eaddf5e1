"""Supervision of learners over schedules of deaths, delays, partitions and hung starts, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest
from learner_schedules import UPDATES, Played, play_seed

from toolwise.cluster.learner_group import LearnerGroup

QUICK = 60


def violations(played: list[Played]) -> list[str]:
    return [f"seed {one.seed}: {text}" for one in played for text in one.violations]


def test_learners_start_again_whatever_dies_and_learn_each_update_once() -> None:
    played = [play_seed(seed) for seed in range(QUICK)]
    assert violations(played) == []
    assert all(one.learned == UPDATES or one.failed for one in played)
    assert sum(one.restarts for one in played) > QUICK / 3
    assert sum(bool(one.failed) for one in played) > 3
    assert sum(one.restarts > 0 and not one.failed for one in played) > 10


@pytest.mark.long
def test_learners_start_again_over_ten_thousand_schedules() -> None:
    assert violations([play_seed(seed) for seed in range(QUICK, QUICK + 10_000)]) == []


class LeavesTheOthers(LearnerGroup):
    """Ends no other learner when one is lost."""

    async def _all(self, what: str, work: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        ranks = list(self._ranks)
        self._ranks = []
        try:
            return await super()._all(what, work)
        finally:
            self._ranks = self._ranks or ranks


class StartsAtOnce(LearnerGroup):
    """Forgets which learners had started when another one's start fails."""

    async def _all(self, what: str, work: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        return list(await asyncio.gather(*work)) if what == "start" else await super()._all(what, work)


@pytest.mark.parametrize("wrong", [LeavesTheOthers, StartsAtOnce])
def test_planted_faults_are_noticed(wrong: type[LearnerGroup]) -> None:
    assert violations([play_seed(seed, wrong) for seed in range(20)])
