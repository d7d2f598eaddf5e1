"""Serves the newest weights. Requests under way finish on the weights they began with; both sets are in memory until
the last of them has ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any

from toolwise.serve.limits import TextLimits
from toolwise.serve.prometheus import ServerMetrics
from toolwise.serve.request import ChatRequest
from toolwise.untrusted.user_code import describe

if TYPE_CHECKING:
    from toolwise.serve.app import Served

log = logging.getLogger("toolwise.serve")


class ReloadableWeights:
    """`load(version)` returns what to serve; `reload` calls it again in a thread and switches new requests over."""

    def __init__(self, load: Callable[[int], Served], metrics: ServerMetrics | None = None) -> None:
        self._load, self._metrics = load, metrics or ServerMetrics()
        self.version = 0
        """Counts reloads: the `policy_version` of answers."""
        self.current = load(0)
        self._reloading = False

    @property
    def name(self) -> str:
        return self.current.name

    @property
    def limits(self) -> TextLimits:
        return self.current.limits

    def metrics(self) -> Mapping[str, float]:
        return self.current.metrics()

    async def read(self, raw: bytes) -> ChatRequest:
        return await self.current.read(raw)

    async def complete(self, request: ChatRequest) -> dict[str, Any]:
        return await self.current.complete(request)

    def stream(self, request: ChatRequest) -> AsyncIterator[dict[str, Any]]:
        return self.current.stream(request)

    async def reload(self) -> bool:
        """Load again; False if that failed, and the old weights stay, or if it is already under way."""
        if self._reloading:
            log.warning("the weights are being loaded already: one reload at a time")
            return False
        self._reloading = True
        try:
            served = await asyncio.to_thread(self._load, self.version + 1)
        except Exception as fault:
            log.error("the weights were not reloaded, the old ones stay: %s", describe(fault))
            self._metrics.reloads["failed"] += 1
            return False
        finally:
            self._reloading = False
        self.version += 1
        self.current = served
        self._metrics.reloads["done"] += 1
        log.warning("new requests use the reloaded weights (version %d)", self.version)
        return True
