"""Weights are published without holding up the replies of workers."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import torch

from toolwise.cluster import weight_publisher
from toolwise.cluster.simulated import SimulatedCluster, Weather
from toolwise.cluster.weight_publisher import WeightPublisher
from toolwise.cluster.weight_transfer import install
from toolwise.config.cluster import ClusterConfig

SLOW_S = 0.2


def test_other_work_goes_on_while_a_whole_copy_is_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    sealed = []

    def seal(*arguments: Any) -> dict[str, Any]:
        time.sleep(SLOW_S)
        sealed.append(arguments)
        return {}

    monkeypatch.setattr(weight_publisher, "whole_copy", seal)
    monkeypatch.setattr(weight_publisher, "fingerprint", lambda model: "x")

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


def test_memory_of_a_version_is_used_again_once_nobody_can_send_it() -> None:
    """A worker that starts may still send the version that was current when it began."""
    model = torch.nn.Linear(2, 2)
    publisher = WeightPublisher(SimulatedCluster({}, Weather()), ClusterConfig(), model)

    def set_weights(version: int) -> None:
        with torch.no_grad():
            for weight in model.parameters():
                weight.fill_(float(version))

    async def work() -> None:
        memory: list[set[int]] = []
        kept = None
        for version in range(1, 7):
            set_weights(version)
            publication = await publisher.publication(version)
            memory.append({id(bits) for bits in publisher._bits.values()})
            if version == 3:
                kept = publication
        assert memory[2] == memory[0]
        assert memory[4] != memory[2]  # still needed
        assert memory[5] == memory[3]
        assert kept is not None
        target = torch.nn.Linear(2, 2)
        version, _ = install(dict(target.named_parameters()), (await kept.whole()).reference, 0)
        assert version == 3
        assert all(bool((weight == 3.0).all()) for weight in target.parameters())

    asyncio.run(work())
