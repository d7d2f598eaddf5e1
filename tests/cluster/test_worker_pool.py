"""Supervision of rollout workers over schedules of deaths, delays, partitions and dead nodes, in virtual time."""

from __future__ import annotations

import asyncio
import os

import pytest
from pool_schedules import CALL_S, Played, play_seed

from toolwise.cluster.interface import (
    ClusterError,
    Payload,
    Process,
    RemoteCallError,
    Resources,
    Stored,
    StoreFullError,
)
from toolwise.cluster.simulated import SimulatedCluster, Weather
from toolwise.cluster.worker_pool import Publication, Worker, WorkerPool
from toolwise.config.cluster import ClusterConfig
from toolwise.testing.virtual_time import simulate

QUICK = 300


def violations(played: list[Played]) -> list[str]:
    return [f"seed {one.seed}: {text}" for one in played for text in one.violations]


def test_every_ticket_is_answered_once_whatever_dies() -> None:
    played = [play_seed(seed) for seed in range(QUICK)]
    assert violations(played) == []
    assert sum(one.reissued for one in played) > 100
    assert sum(one.refused for one in played) > 10
    assert sum(one.differences for one in played) > 100
    assert sum(bool(one.failed) for one in played) > 10
    assert sum(not one.failed for one in played) > 100
    assert sum(one.full for one in played) > 3


def test_any_error_of_a_start_ends_the_run() -> None:
    """Not only those that a cluster is known to raise: nobody else would notice that there is no worker."""

    def broken(_: Payload) -> Answers:
        raise ValueError("no such device")

    async def work() -> None:
        pool = WorkerPool(SimulatedCluster({"rollout": broken}, Weather()), ClusterConfig(workers=2), {})
        try:
            await pool.start()
        finally:
            await pool.close()

    with pytest.raises(ClusterError, match="worker-0: no such device"):
        simulate(work())


def test_no_worker_is_ended_because_the_store_is_full() -> None:
    async def work() -> int:
        cluster = SimulatedCluster({"rollout": lambda _: Answers()}, Weather(full_store=1.0))
        pool = WorkerPool(cluster, ClusterConfig(workers=2), {})
        await pool.start()
        try:
            await pool.publish(Publication(1, lambda: cluster.store({}, deadline_s=5.0)))
        finally:
            alive = len(cluster.alive)
            assert (alive, pool.counts["deaths"], asyncio.get_running_loop().time()) == (2, 0, 5.0)
            await pool.close()
            await cluster.close()
        return alive

    with pytest.raises(StoreFullError, match="full for 5 s"):
        simulate(work())


@pytest.mark.long
def test_every_ticket_is_answered_once_over_ten_thousand_schedules() -> None:
    first = int(os.environ.get("TOOLWISE_FIRST_SEED", QUICK))
    assert violations([play_seed(seed) for seed in range(first, first + 10_000)]) == []


class ForgetsWeights(WorkerPool):
    """Believes that a new worker has the weights."""

    async def _send(self, worker: Worker) -> None:
        if worker not in self.workers and self.publication is not None:
            worker.version = self.publication.version
        else:
            await super()._send(worker)


class NeverGivesUp(WorkerPool):
    def _count_death(self, name: str, reason: str) -> bool:
        self.counts["deaths"] += 1
        return True


@pytest.mark.parametrize("wrong", [ForgetsWeights, NeverGivesUp])
def test_planted_faults_are_noticed(wrong: type[WorkerPool]) -> None:
    assert violations([play_seed(seed, wrong) for seed in range(60)])


class Counting:
    """Counts the calls that run at once."""

    def __init__(self) -> None:
        self.running = self.most = self.calls = 0

    async def handle(self, method: str, payload: Payload) -> Payload:
        self.running += 1
        self.calls += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(1.0)
        self.running -= 1
        return {}


def test_tickets_go_to_the_least_busy_worker() -> None:
    handlers: list[Counting] = []

    def build(_: Payload) -> Counting:
        handlers.append(Counting())
        return handlers[-1]

    async def work() -> float:
        cluster = SimulatedCluster({"rollout": build}, Weather())
        pool = WorkerPool(cluster, ClusterConfig(workers=3), {}, slots=4)
        await pool.start()
        await asyncio.gather(*(pool.run({}) for _ in range(9)))
        seconds = asyncio.get_running_loop().time()
        await pool.close()
        await cluster.close()
        return seconds

    assert simulate(work()) == pytest.approx(1.0)
    assert [handler.most for handler in handlers] == [3, 3, 3]


class Hangs:
    async def handle(self, method: str, payload: Payload) -> Payload:
        await asyncio.sleep(3600.0)
        return {}


class Answers:
    async def handle(self, method: str, payload: Payload) -> Payload:
        return {"done": 1, "version": 1}


def test_a_worker_that_hangs_is_replaced_after_the_deadline() -> None:
    handlers = iter([Hangs(), Answers()])

    async def work() -> tuple[Payload, float, int]:
        cluster = SimulatedCluster({"rollout": lambda _: next(handlers)}, Weather())
        pool = WorkerPool(cluster, ClusterConfig(workers=1), {}, call_s=CALL_S)
        await pool.start()
        reply = await pool.run({})
        seconds, alive = asyncio.get_running_loop().time(), len(cluster.alive)
        await pool.close()
        await cluster.close()
        return reply, seconds, alive

    reply, seconds, alive = simulate(work())
    assert reply["done"] == 1
    assert (seconds, alive) == (CALL_S, 1)


class BrokenCluster(SimulatedCluster):
    async def start(
        self,
        role: str,
        name: str,
        payload: Payload,
        resources: Resources,
        *,
        deadline_s: float,
        stored: Stored | None = None,
    ) -> Process:
        raise RemoteCallError("tools: no such tool")


def test_an_error_of_the_code_is_not_tried_again() -> None:
    async def work() -> None:
        pool = WorkerPool(BrokenCluster({}, Weather()), ClusterConfig(workers=2), {})
        try:
            await pool.start()
        finally:
            assert not pool.counts["deaths"]
            await pool.close()

    with pytest.raises(ClusterError, match="no such tool"):
        simulate(work())


def test_an_idle_worker_that_dies_is_replaced() -> None:
    async def work() -> int:
        cluster = SimulatedCluster({"rollout": lambda _: Answers()}, Weather())
        pool = WorkerPool(cluster, ClusterConfig(workers=2), {})
        await pool.start()
        await pool.publish(Publication(1, lambda: cluster.store({}, deadline_s=1.0)))
        cluster.end(cluster.alive[0], "out of memory")
        await asyncio.sleep(10.0)
        versions = [worker.version for worker in pool.workers]
        await pool.close()
        await cluster.close()
        assert versions == [1, 1]
        return cluster.started

    assert simulate(work()) == 3
