"""Rollout workers out of one seed, in virtual time: tickets, publications, deaths, delays, partitions, dead nodes."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

from toolwise.cluster.interface import ClusterError, Payload, RefusedError, Stored
from toolwise.cluster.simulated import SimulatedCluster, Weather
from toolwise.cluster.worker_pool import Publication, WorkerPool
from toolwise.config.cluster import ClusterConfig
from toolwise.testing.virtual_time import simulate

CALL_S, LONGEST_S = 30.0, 20.0


@dataclass
class Played:
    """What happened, by the schedule's own count."""

    seed: int
    violations: list[str] = field(default_factory=list)
    replies: dict[int, int] = field(default_factory=dict)
    """ticket -> replies"""
    failed: str = ""
    reissued: int = 0
    refused: int = 0
    deaths: int = 0
    full: bool = False
    """Ended because the object store stayed full."""
    whole: int = 0
    differences: int = 0
    seconds: float = 0.0


class FakeWorker:
    """Rolls out by waiting; refuses weights that do not follow on its own, and some that do."""

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.version, self.hash = chance, 0, 0

    async def handle(self, method: str, payload: Payload) -> Payload:
        await asyncio.sleep(self.chance.uniform(0.0, LONGEST_S if method == "roll_out" else 0.5))
        if method == "install":
            base, version = int(payload["base"]), int(payload["version"])  # type: ignore[arg-type]
            if base >= 0 and (base != self.version or self.chance.random() < 0.1):
                raise RefusedError("another base")
            if version < self.version:
                raise RefusedError("older")
            self.hash = int(payload["hash"]) if base < 0 else self.hash + int(payload["hash"])  # type: ignore[arg-type]
            self.version = version
            return {"version": version}
        if self.hash != weights_of(self.version):
            raise ClusterError(f"weights {self.hash} at version {self.version}")
        return {"group": int(payload["seed"]) * 7, "version": self.version}  # type: ignore[arg-type]


def weights_of(version: int) -> int:
    return version * version


async def play(seed: int, pool_class: type[WorkerPool] = WorkerPool) -> Played:
    chance, played = random.Random(f"pool {seed}"), Played(seed)
    weather = Weather(
        deaths_per_s=chance.choice((0.0, 0.002, 0.02)),
        node_deaths_per_s=chance.choice((0.0, 0.0, 0.005)),
        max_delay_s=chance.choice((0.0, 0.1, 5.0)),
        lost=chance.choice((0.0, 0.0, 0.03)),
        failed_starts=chance.choice((0.0, 0.2)),
        hung_starts=chance.choice((0.0, 0.0, 0.1)),
        full_store=chance.choice((0.0, 0.0, 0.0, 0.05)),
    )
    cluster = SimulatedCluster({"rollout": lambda _: FakeWorker(chance)}, weather, nodes=2, seed=seed)
    cluster.start_node_deaths()
    config = ClusterConfig(workers=chance.randint(1, 4), max_restarts=chance.choice((0, 5, 1000)))
    slots, steps, tickets = chance.randint(1, 3), chance.randint(1, 4), chance.randint(1, 6)
    pool = pool_class(cluster, config, {}, slots=slots, call_s=CALL_S)
    loop = asyncio.get_running_loop()

    async def produce(ticket: int, at_least: int) -> None:
        reply = await pool.run({"seed": ticket})
        played.replies[ticket] = played.replies.get(ticket, 0) + 1
        if reply["group"] != ticket * 7:
            played.violations.append(f"ticket {ticket} came back as {reply['group']}")
        if int(reply["version"]) < at_least:  # type: ignore[arg-type]
            played.violations.append(f"ticket {ticket} was rolled out with {reply['version']}, not {at_least}")
        if sum(worker.load for worker in pool.workers) > slots * config.workers:
            played.violations.append("too many tickets at once")

    async def train() -> None:
        await pool.start()
        newest = 0

        async def give() -> Stored:
            """Also for who asks for an older one."""
            whole = {"base": -1, "version": newest, "hash": weights_of(newest)}
            return await cluster.store(whole, deadline_s=config.transfer_s)

        for step in range(steps):
            newest = step
            await asyncio.sleep(chance.choice((0.0, 0.5)))  # it is gathered
            change = {"base": step - 1, "version": step, "hash": weights_of(step) - weights_of(step - 1)}
            difference = Stored(change, 1) if step and chance.random() < 0.7 else None
            await pool.publish(Publication(step, give, step - 1, difference))
            if any(worker.version != step for worker in pool.workers):
                played.violations.append(f"a worker was left behind version {step}")
            async with asyncio.TaskGroup() as group:
                for index in range(tickets):
                    group.create_task(produce(step * 100 + index, step))

    try:
        await train()
    except (ClusterError, ExceptionGroup) as fault:
        played.failed = str(fault.exceptions[0] if isinstance(fault, ExceptionGroup) else fault)
    played.seconds = loop.time()
    counts = pool.counts
    played.reissued, played.refused, played.deaths = counts["reissued"], counts["refused"], counts["deaths"]
    played.whole, played.differences = counts["whole_copies"], counts["differences"]
    check(played, pool, config, [step * 100 + i for step in range(steps) for i in range(tickets)], cluster)
    await pool.close()
    await cluster.close()
    if cluster.alive:
        played.violations.append("processes are left over")
    return played


def check(
    played: Played, pool: WorkerPool, config: ClusterConfig, tickets: list[int], cluster: SimulatedCluster
) -> None:
    if any(count != 1 for count in played.replies.values()):
        played.violations.append("a ticket was answered twice")
    if not played.failed and sorted(played.replies) != tickets:
        played.violations.append("a ticket was lost")
    full = "object store was full" in played.failed
    if played.failed and not full and pool.counts["deaths"] <= config.max_restarts:
        played.violations.append(f"ended within its budget: {played.failed}")
    played.full = full
    if cluster.started > config.workers + config.max_restarts:
        played.violations.append("started workers beyond its budget")
    if len(pool.workers) > config.workers:
        played.violations.append("too many workers")


def play_seed(seed: int, pool_class: type[WorkerPool] = WorkerPool) -> Played:
    return simulate(play(seed, pool_class), seed=seed)
