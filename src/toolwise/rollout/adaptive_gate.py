"""How many episodes run at a time, by measurement: enough to keep the engine busy, without evictions that slow it down
(`rollout.max_concurrent = "auto"`).

An episode waits for its tools most of the time. If it generates for a share f of its time, `slots` requests are in the
engine on average when slots / f episodes run (Little's law). Each holds its tokens in the cache; if they do not fit,
the engine evicts what it needs again and computes it anew. So

    limit = min(1.25 · slots / f, 0.9 · cache / tokens of an episode)

with f and the tokens measured over the last episodes, and a quarter more for chance. The second term does not apply
while the engine has nothing to do for a quarter of the time: computing again then costs nothing but idle time. Once it
is idle for less than a tenth, the limit falls at once to what the cache holds. It rises by halves.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from toolwise.concurrency.limits import Gate
from toolwise.protocols import Metrics
from toolwise.types import Rollout

CACHE_SHARE, SPARE = 0.9, 1.25
MEMORY = 32
"""Episodes over which the tokens are averaged."""
MOST = 8192
IDLE, BUSY = 0.25, 0.1
"""Shares of its time in which the engine has nothing to do: above the first the cache may be too small for all
episodes, below the second it may not."""


class AdaptiveGate(Gate):
    """First come, first served. `slots` are the requests that the engine computes together, `cache_tokens` what its
    cache holds, `generating_s` the seconds that all requests so far have spent in the engine, `busy_s` those in which
    it had any; rollouts of one prompt share it, `n` at a time."""

    def __init__(
        self,
        *,
        slots: int,
        cache_tokens: Callable[[], int],
        generating_s: Callable[[], float],
        busy_s: Callable[[], float],
        n: int = 1,
    ) -> None:
        super().__init__(max(n, slots))
        self.slots, self.n = slots, n
        self._cache_tokens, self._generating_s, self._busy_s = cache_tokens, generating_s, busy_s
        self.held = 0
        self.generating_share = 1.0
        self.tokens = 0.0
        """Of an episode, in the mean."""
        self._episodes = 0
        self._in_flight_s, self._changed_at = 0.0, 0.0
        self._since = (0, 0.0, 0.0)
        """Episodes, seconds in flight and seconds in the engine when the share was measured last."""
        self._open_s = 0.0
        """Seconds in which any episode was in flight: between batches the engine has nothing to do anyway."""
        self._clock: tuple[float, float] | None = None
        """Those seconds then, and the seconds in which the engine had been busy."""
        self._idles = False
        """Whether the engine has time to compute again what does not fit into the cache."""
        self._waiters: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        if self.held < self._limit and not self._waiters:
            self._hold(1)
            return
        granted = asyncio.get_running_loop().create_future()
        self._waiters.append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.leave()  # it had just been let in
            else:
                with suppress(ValueError):  # it may have been passed over already
                    self._waiters.remove(granted)
            raise

    def leave(self) -> None:
        self._hold(-1)
        self._admit()

    def observe(self, rollout: Rollout) -> None:
        """An episode has ended."""
        tokens = [step.tokens for step in rollout.steps if step.tokens.has_ids]
        if tokens:
            whole = len(tokens[-1].prompt_ids) + len(tokens[-1].token_ids)
            own = whole - len(tokens[0].prompt_ids) * (1.0 - 1.0 / self.n)
            self._episodes += 1
            self.tokens += (own - self.tokens) / min(self._episodes, MEMORY)
        self._measure()
        self._admit()

    def metrics(self) -> Metrics:
        return {
            "rollout/limit": float(self._limit),
            "rollout/in_flight": float(self.held),
            "rollout/generating_share": self.generating_share,
        }

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    @property
    def _limit(self) -> int:
        assert self.limit is not None
        return self.limit

    def _measure(self) -> None:
        """Set the limit, if enough episodes have ended since the last time."""
        fits = max(self.n, int(CACHE_SHARE * self._cache_tokens() / max(1.0, self.tokens)))
        if not self._idles:
            self.limit = min(self._limit, fits)
        episodes, in_flight_s, generating_s = self._since
        self._hold(0)
        if self._episodes - episodes < max(MEMORY, self._limit // 4):
            return
        spent, in_engine = self._in_flight_s - in_flight_s, self._generating_s() - generating_s
        self._since = self._episodes, self._in_flight_s, self._generating_s()
        self._measure_idle()
        room = MOST if self._idles else fits
        self.limit = min(self._limit, room)
        if spent > 0 and in_engine > 0:
            self.generating_share = min(1.0, in_engine / spent)
            wanted = min(MOST, math.ceil(SPARE * self.slots / self.generating_share), room)
            self.limit = max(self.n, self._limit + math.ceil((wanted - self._limit) / 2))

    def _measure_idle(self) -> None:
        before, self._clock = self._clock, (self._open_s, self._busy_s())
        if before is not None and self._open_s > before[0]:
            idle = 1.0 - (self._clock[1] - before[1]) / (self._open_s - before[0])
            self._idles = idle > (BUSY if self._idles else IDLE)

    def _hold(self, change: int) -> None:
        now = asyncio.get_running_loop().time()
        passed = max(0.0, now - self._changed_at)
        self._in_flight_s += self.held * passed
        self._open_s += passed if self.held else 0.0
        self._changed_at, self.held = now, self.held + change

    def _admit(self) -> None:
        while self._waiters and self.held < self._limit:
            waiter = self._waiters.popleft()
            if not waiter.done():
                self._hold(1)
                waiter.set_result(None)
