"""Publishes the learner's weights to the rollout workers, one version after another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

from toolwise.cluster.interface import Cluster, Stored
from toolwise.cluster.weight_transfer import SentWeights, transferred_weights
from toolwise.cluster.worker_pool import Publication
from toolwise.concurrency.tasks import spawn
from toolwise.config.cluster import ClusterConfig
from toolwise.learner.fingerprint import fingerprint

T = TypeVar("T")


class WeightPublisher:
    """Keeps one copy of the last version: what the next one differs from, and what a worker that starts later gets,
    whatever the learner does meanwhile. `on_event` is told how long each part takes."""

    def __init__(
        self,
        cluster: Cluster,
        config: ClusterConfig,
        model: Any,
        on_event: Callable[..., None] = lambda kind, process, **numbers: None,
    ) -> None:
        self.cluster, self.config, self.model, self.on_event = cluster, config, model, on_event
        self.sent = SentWeights()
        self._in_use = asyncio.Lock()
        """Held while the copy is written or stored."""
        self._whole: asyncio.Task[Stored] | None = None
        self._differences = 0
        """Since the last whole copy."""

    async def publication(self, version: int) -> Publication:
        """The weights as they are now, as `version`. They are gathered before anything is sent, to the end even if the
        caller is cancelled."""
        return await asyncio.shield(spawn(self._publication(version)))

    async def _publication(self, version: int) -> Publication:
        async with self._in_use:
            base, compare = self.sent.version, self._differences + 1 < self.config.whole_copy_every
            changes = await self._timed("gather", self._gather, version, compare)
            if self._whole is not None and self._whole.done():
                self._whole = None
        self._differences = 0 if changes is None else self._differences + 1
        stored = None if changes is None else await self._store(changes)
        return Publication(version, self.whole, -1 if base is None else base, stored)

    def _gather(self, version: int, compare: bool) -> dict[str, Any] | None:
        return self.sent.take(transferred_weights(self.model), version, fingerprint(self.model), compare=compare)

    async def whole(self) -> Stored:
        """All weights of the newest version, stored when the first worker needs them; all others get the same."""
        failed = self._whole is not None and self._whole.done() and self._whole.exception() is not None
        if self._whole is None or failed:
            self._whole = spawn(self._store_whole())
        return await asyncio.shield(self._whole)

    async def _store_whole(self) -> Stored:
        async with self._in_use:
            payload = await self._timed("seal", self.sent.whole)  # a checksum over gigabytes
            return await self._store(payload)

    async def _timed(self, what: str, work: Callable[..., T], *arguments: Any) -> T:
        began = time.monotonic()
        result = await asyncio.to_thread(work, *arguments)
        self.on_event(what, "driver", seconds=time.monotonic() - began)
        return result

    async def _store(self, payload: Any) -> Stored:
        began = time.monotonic()
        stored = await self.cluster.store(payload, deadline_s=self.config.transfer_s)
        self.on_event("store", "driver", seconds=time.monotonic() - began, bytes=stored.bytes)
        return stored
