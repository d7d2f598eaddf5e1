"""Admits requests: so many are answered at a time, so many wait, the rest are told when to come back."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from toolwise.serve.limits import ServerLimits
from toolwise.serve.request import BadRequestError

MAX_RETRY_S = 60
_SMOOTHING = 0.1


@dataclass(slots=True)
class Admission:
    """Belongs to one event loop."""

    limits: ServerLimits
    active: int = 0
    waiting: int = 0
    draining: bool = False
    """The server is about to end: /ready says so."""
    warm: bool = True
    """Whether the model has answered once."""
    mean_s: float = 1.0
    """Moving average of the time that an answer takes."""
    _slots: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.limits.active)

    def check(self) -> None:
        """Raise if a request would not be admitted now."""
        if self.active >= self.limits.active and self.waiting >= self.limits.queued:
            raise BadRequestError(
                f"the server is busy: {self.active} requests are answered and {self.waiting} wait; try again later",
                code="rate_limit_exceeded",
                status=429,
                headers={"Retry-After": str(self.retry_s())},
            )

    def retry_s(self) -> int:
        """About when those that wait now have been answered."""
        rounds = (self.waiting + 1) / self.limits.active
        return min(MAX_RETRY_S, max(1, math.ceil(rounds * self.mean_s)))

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a turn, and hold it while the request is answered. Leaving early frees it."""
        self.check()
        self.waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.waiting -= 1
        self.active += 1
        start = time.monotonic()
        try:
            yield
        finally:
            self.active -= 1
            self._slots.release()
            self.mean_s += _SMOOTHING * (time.monotonic() - start - self.mean_s)
