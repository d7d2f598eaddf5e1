"""Weights are published without holding up the replies of workers."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import torch

from toolwise.cluster.simulated import SimulatedCluster, Weather
from toolwise.cluster.weight_publisher import WeightPublisher
from toolwise.cluster.weight_transfer import SentWeights, install
from toolwise.config.cluster import ClusterConfig

SLOW_S = 0.2


def test_other_work_goes_on_while_a_whole_copy_is_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    sealed = []

    def seal(sent: SentWeights) -> dict[str, Any]:
        time.sleep(SLOW_S)
        sealed.append(sent)
        return {}

    monkeypatch.setattr(SentWeights, "whole", seal)

    async def work() -> int:
        cluster = SimulatedCluster({}, Weather())
        publication = await WeightPublisher(cluster, ClusterConfig(), torch.nn.Linear(2, 2)).publication(1)
        copies = asyncio.gather(publication.whole(), publication.whole())
        turns = 0
        while not copies.done():
            await asyncio.sleep(SLOW_S / 20)
            turns += 1
        first, second = copies.result()
        assert first is second
        return turns

    assert asyncio.run(work()) >= 3
    assert len(sealed) == 1


def test_there_is_one_copy_and_whoever_asks_gets_the_newest_version_of_it() -> None:
    """A worker that starts may still ask for the version that was current when it began."""
    model = torch.nn.Linear(2, 2)
    publisher = WeightPublisher(SimulatedCluster({}, Weather()), ClusterConfig(), model)

    def set_weights(version: int) -> None:
        with torch.no_grad():
            for weight in model.parameters():
                weight.fill_(float(version))

    async def work() -> None:
        memory: list[set[int]] = []
        publications = []
        for version in range(1, 5):
            set_weights(version)
            publications.append(await publisher.publication(version))
            memory.append({id(bits) for bits in publisher.sent.bits.values()})
        set_weights(5)  # by the next update
        assert all(one == memory[0] for one in memory)
        target = torch.nn.Linear(2, 2)
        version, _ = install(dict(target.named_parameters()), (await publications[1].whole()).reference, 0)
        assert version == 4
        assert all(bool((weight == 4.0).all()) for weight in target.parameters())

    asyncio.run(work())


def test_a_whole_copy_is_of_one_version_even_if_the_next_is_gathered_meanwhile() -> None:
    model = torch.nn.Linear(300, 300)
    publisher = WeightPublisher(SimulatedCluster({}, Weather()), ClusterConfig(), model)

    class Slow(SimulatedCluster):
        async def store(self, payload: Any, **options: Any) -> Any:
            await asyncio.sleep(0.05)
            return await super().store(payload, **options)

    async def work() -> None:
        publisher.cluster = Slow({}, Weather())
        first = await publisher.publication(1)
        asked = asyncio.gather(first.whole(), first.whole())
        await asyncio.sleep(0.01)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(1.0)
        second = await publisher.publication(2)
        target = torch.nn.Linear(300, 300)
        for stored in (*await asked, await second.whole()):
            install(dict(target.named_parameters()), stored.reference, 0)  # else its checksum is wrong
        assert torch.equal(target.weight, model.weight)

    asyncio.run(work())
