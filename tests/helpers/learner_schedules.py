"""A group of learners out of one seed, in virtual time: deaths, delays, partitions, starts that fail or hang. A run
starts it again from its last checkpoint, as `train_on_cluster` does."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import torch

from toolwise.cluster.interface import ClusterError, Payload, RemoteCallError
from toolwise.cluster.learner_group import LearnerGroup, LearnersLostError
from toolwise.cluster.simulated import SimulatedCluster, Weather
from toolwise.config.schema import RunConfig
from toolwise.learner.actor import Actor
from toolwise.learner.fingerprint import fingerprint
from toolwise.testing.virtual_time import simulate

UPDATES, UPDATE_S, START_S = 4, 60.0, 50.0
MODEL = torch.nn.Linear(2, 2)


@dataclass
class Played:
    seed: int
    violations: list[str] = field(default_factory=list)
    learned: int = 0
    restarts: int = 0
    failed: str = ""


class Meeting:
    """What the ranks of one start compute together: each waits for all others."""

    def __init__(self) -> None:
        self.arrived: dict[str, set[int]] = {}
        self.complete: dict[str, asyncio.Event] = {}

    async def all_ranks(self, what: str, rank: int, ranks: int) -> None:
        self.arrived.setdefault(what, set()).add(rank)
        event = self.complete.setdefault(what, asyncio.Event())
        if len(self.arrived[what]) == ranks:
            event.set()
        await event.wait()


class FakeLearner:
    """Its weights are the updates that it has made."""

    def __init__(self, chance: random.Random, meetings: list[Meeting]) -> None:
        self.chance, self.meetings = chance, meetings
        self.rank = self.ranks = self.port = self.updates = 0

    async def handle(self, method: str, payload: Payload) -> Payload:
        numbers: dict[str, Any] = dict(payload)
        if method == "listen":
            self.meetings.append(Meeting())
            return {"port": len(self.meetings) - 1}
        if method == "connect":
            self.rank, self.ranks, self.port = numbers["rank"], numbers["ranks"], numbers["port"]
        await asyncio.sleep(self.chance.uniform(0.0, 5.0))
        if self.chance.random() < 0.02:
            raise RemoteCallError("learner: RuntimeError: [/x/gloo/transport/tcp/pair.cc:5] Connection closed by peer")
        await self.meetings[self.port].all_ranks(f"{method} {numbers.get('update')}", self.rank, self.ranks)
        if method == "connect":
            return {"fingerprint": fingerprint(MODEL).encode(), "pid": 1}
        self.updates = numbers["update"] if method == "load" else self.updates + 1
        return {"updates": self.updates}


async def play(seed: int, group_class: type[LearnerGroup] = LearnerGroup) -> Played:
    chance, played, meetings = random.Random(f"learners {seed}"), Played(seed), list[Meeting]()
    weather = Weather(
        deaths_per_s=chance.choice((0.0, 0.001, 0.01)),
        node_deaths_per_s=chance.choice((0.0, 0.0, 0.005)),
        max_delay_s=chance.choice((0.0, 1.0, 10.0)),
        lost=chance.choice((0.0, 0.0, 0.02)),
        failed_starts=chance.choice((0.0, 0.1)),
        hung_starts=chance.choice((0.0, 0.1)),
    )
    cluster = SimulatedCluster({"learner": lambda _: FakeLearner(chance, meetings)}, weather, nodes=2, seed=seed)
    cluster.start_node_deaths()
    ranks, budget = chance.randint(1, 4), chance.choice((0, 3, 50))
    settings = {"learners": ranks, "start_s": START_S, "update_s": UPDATE_S, "max_learner_restarts": budget}
    config = RunConfig.model_validate({"cluster": {"address": "local", **settings}})
    loop = asyncio.get_running_loop()
    group = group_class(cluster, config, cast(Actor, SimpleNamespace(model=MODEL)), {}, None)
    while played.learned < UPDATES:
        began = loop.time()
        try:
            await group._start()
            if len(cluster.alive) > ranks:
                played.violations.append("learners of an earlier start are left over")
            await group._call_all("load", [{"update": played.learned}] * ranks)
            for update in range(played.learned, UPDATES):
                replies = await group._call_all("update", [{"update": update}] * ranks)
                if {reply["updates"] for reply in replies} != {update + 1}:
                    played.violations.append(f"update {update + 1} was learned as {replies}")
                played.learned = update + 1
            await group._kill()
        except LearnersLostError as fault:
            if cluster.alive:
                played.violations.append(f"learners are left over after: {fault}")
            played.restarts += 1
            if played.restarts > budget:
                played.failed = str(fault)
                break
        except ClusterError as fault:
            played.violations.append(f"no start again after: {fault}")
            break
        if loop.time() - began > 3 * START_S + (UPDATES + 2) * UPDATE_S:
            played.violations.append("a wait had no end")
    if cluster.alive:
        played.violations.append("learners are left over at the end")
    group.close()
    await cluster.close()
    return played


def play_seed(seed: int, group_class: type[LearnerGroup] = LearnerGroup) -> Played:
    return simulate(play(seed, group_class), seed=seed)
