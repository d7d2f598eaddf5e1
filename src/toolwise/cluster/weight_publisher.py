"""Publishes the learner's weights to the rollout workers, one version after another."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from toolwise.cluster.interface import Cluster, Stored
from toolwise.cluster.weight_transfer import Bits, bits_of, difference, transferred_weights, whole_copy
from toolwise.cluster.worker_pool import Publication
from toolwise.config.cluster import ClusterConfig
from toolwise.learner.fingerprint import fingerprint

T = TypeVar("T")


class WeightPublisher:
    """Keeps the bits of the last version: what the next one differs from, and what a worker that starts later gets,
    whatever the learner does meanwhile. `on_event` is told how long each part takes."""

    def __init__(
        self,
        cluster: Cluster,
        config: ClusterConfig,
        model: Any,
        on_event: Callable[..., None] = lambda kind, process, **numbers: None,
    ) -> None:
        self.cluster, self.config, self.model, self.on_event = cluster, config, model, on_event
        self.version: int | None = None
        self._bits: Bits = {}
        self._older: tuple[Bits | None, weakref.ref[_Once] | None] = None, None
        """The memory of the version before, and who may still send it."""
        self._newest: weakref.ref[_Once] | None = None
        self._differences = 0
        """Since the last whole copy."""

    async def publication(self, version: int) -> Publication:
        """The weights as they are now, as `version`. They are gathered before anything is sent."""
        bits, found = await self._timed("gather", self._gather)
        changes = None
        if self.version is not None and self._differences + 1 < self.config.whole_copy_every:
            changes = await self._timed("compare", difference, bits, self._bits, version, self.version, found)
        self._differences = 0 if changes is None else self._differences + 1
        whole = _Once(self, bits, version, found)
        self._older, self._newest = (self._bits or None, self._newest), weakref.ref(whole)
        base, self.version, self._bits = self.version, version, bits
        stored = None if changes is None else await self._store(changes)
        return Publication(version, whole, -1 if base is None else base, stored)

    def _gather(self) -> tuple[Bits, str]:
        memory, user = self._older
        self._older = None, None
        in_use = user is not None and user() is not None
        return bits_of(transferred_weights(self.model), None if in_use else memory), fingerprint(self.model)

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


class _Once:
    """Stores a whole copy when the first worker needs it, and gives all others the same one. Its memory is not
    used again while anything refers to it."""

    def __init__(self, publisher: WeightPublisher, bits: Bits, version: int, found: str) -> None:
        self._publisher, self._arguments = publisher, (bits, version, found)
        self._stored: asyncio.Future[Stored] | None = None

    async def __call__(self) -> Stored:
        if self._stored is None or (self._stored.done() and self._stored.exception() is not None):
            self._stored = asyncio.ensure_future(self._store())
        return await asyncio.shield(self._stored)

    async def _store(self) -> Stored:
        payload = await self._publisher._timed("seal", whole_copy, *self._arguments)  # a checksum over gigabytes
        return await self._publisher._store(payload)
