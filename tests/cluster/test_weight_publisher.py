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
