"""Serves the newest weights. Requests under way finish on the weights they began with; both sets are in memory until
the last of them has ended, and the old ones are then closed."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolwise.serve.event_stream import ShortCut
from toolwise.serve.limits import TextLimits
from toolwise.serve.prometheus import ServerMetrics
from toolwise.serve.request import ChatRequest
from toolwise.untrusted.user_code import describe

if TYPE_CHECKING:
    from toolwise.serve.app import Served

log = logging.getLogger("toolwise.serve")


@dataclass(slots=True, eq=False)
class _Use:
    """What is served, and how many requests use it."""

    served: Served
    requests: int = 0


class ReloadableWeights:
    """`load(version)` returns what to serve; `reload` calls it again in a thread and switches new requests over."""

    def __init__(self, load: Callable[[int], Served], metrics: ServerMetrics | None = None) -> None:
        self._load, self._metrics = load, metrics or ServerMetrics()
        self.version = 0
        """Counts reloads: the `policy_version` of answers."""
        self._current = _Use(load(0))
        self._old: list[_Use] = []
        """Replaced ones with requests under way."""
        self._reloading = self._again = False

    @property
    def current(self) -> Served:
        return self._current.served

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
        with self._use() as served:
            return await served.complete(request)

    async def stream(self, request: ChatRequest, short_cut: ShortCut | None = None) -> AsyncIterator[dict[str, Any]]:
        with self._use() as served:
            async with aclosing(served.stream(request, short_cut)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    yield chunk

    @contextmanager
    def _use(self) -> Iterator[Served]:
        """The current weights, for one request; old ones are closed after their last."""
        use = self._current
        use.requests += 1
        try:
            yield use.served
        finally:
            use.requests -= 1
            if use in self._old and not use.requests:
                self._end(use)

    def _end(self, use: _Use) -> None:
        """Close old weights, in a thread; nothing waits for it."""
        self._old.remove(use)
        gc.unfreeze()  # the weights that the server began with may be garbage now: collect them with everything else
        asyncio.get_running_loop().run_in_executor(None, _close, use.served)

    def close(self) -> None:
        """Close all that is left, when the server has ended."""
        for use in (self._current, *self._old):
            _close(use.served)

    async def reload(self) -> bool:
        """Load again; False if that failed, and the old weights stay, or if it is already under way: then they are
        loaded once more afterwards, as they may have changed since it began."""
        if self._reloading:
            log.warning("the weights are being loaded already: they are loaded once more afterwards")
            self._again = True
            return False
        self._reloading = True
        try:
            done = await self._reload_once()
            while self._again:
                self._again = False
                done = await self._reload_once()
        finally:
            self._reloading = self._again = False
        return done

    async def _reload_once(self) -> bool:
        try:
            served = await asyncio.to_thread(self._load, self.version + 1)
        except Exception as fault:
            log.error("the weights were not reloaded, the old ones stay: %s", describe(fault))
            self._metrics.reloads["failed"] += 1
            return False
        self.version += 1
        old, self._current = self._current, _Use(served)
        self._old.append(old)
        self._metrics.reloads["done"] += 1
        log.warning("new requests use the reloaded weights (version %d)", self.version)
        if not old.requests:
            self._end(old)
        return True


def _close(served: Served) -> None:
    try:
        served.close()
    except Exception as fault:  # the requests have ended: nobody is waiting for it
        log.error("closing the weights failed: %s", describe(fault))
