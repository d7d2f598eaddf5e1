"""Publishes the learner's weights to the rollout workers, one version after another."""

from __future__ import annotations

import asyncio
from typing import Any

from toolwise.cluster.interface import Cluster, Stored
from toolwise.cluster.weight_transfer import Bits, bits_of, difference, transferred_weights, whole_copy
from toolwise.cluster.worker_pool import Publication
from toolwise.config.cluster import ClusterConfig
from toolwise.learner.fingerprint import fingerprint


class WeightPublisher:
    """Keeps the bits of the last version: what the next one differs from, and what a worker that starts later gets,
    whatever the learner does meanwhile."""

    def __init__(self, cluster: Cluster, config: ClusterConfig, model: Any) -> None:
        self.cluster, self.config, self.model = cluster, config, model
        self.version: int | None = None
        self._bits: Bits = {}
        self._differences = 0
        """Since the last whole copy."""

    async def publication(self, version: int) -> Publication:
        """The weights as they are now, as `version`. They are gathered before anything is sent."""
        bits, found = await asyncio.to_thread(self._gather)
        changes = None
        if self.version is not None and self._differences + 1 < self.config.whole_copy_every:
            changes = await asyncio.to_thread(difference, bits, self._bits, version, self.version, found)
        self._differences = 0 if changes is None else self._differences + 1
        base, self.version, self._bits = self.version, version, bits
        stored = None if changes is None else await self._store(changes)
        return Publication(version, _Once(self, bits, version, found), -1 if base is None else base, stored)

    def _gather(self) -> tuple[Bits, str]:
        return bits_of(transferred_weights(self.model)), fingerprint(self.model)

    async def _store(self, payload: Any) -> Stored:
        return await self.cluster.store(payload, deadline_s=self.config.transfer_s)


class _Once:
    """Stores a whole copy when the first worker needs it, and gives all others the same one."""

    def __init__(self, publisher: WeightPublisher, bits: Bits, version: int, found: str) -> None:
        self._publisher, self._arguments = publisher, (bits, version, found)
        self._stored: asyncio.Future[Stored] | None = None

    async def __call__(self) -> Stored:
        if self._stored is None or (self._stored.done() and self._stored.exception() is not None):
            self._stored = asyncio.ensure_future(self._store())
        return await asyncio.shield(self._stored)

    async def _store(self) -> Stored:
        payload = await asyncio.to_thread(whole_copy, *self._arguments)  # a checksum over gigabytes
        return await self._publisher._store(payload)
