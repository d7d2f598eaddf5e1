"""Where a simulated run plays: who was where when, how people misbehave, and what they found to be wrong."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from toolwise.testing.virtual_time import VirtualLoop
from toolwise.tools.call_errors import SERVER_DOWN, ToolCallError

Episode = tuple[int, int]
"""batch_data_id, rollout_offset"""


class Mood(StrEnum):
    """What a visit to other people's code turns out to be like."""

    PROMPT = "prompt"
    SLOW = "slow"
    RAISES = "raises"
    DIES = "dies"
    """Raises in the middle, as a server does that goes away."""
    HANGS = "hangs"
    SLOW_TO_GO = "slow to go"
    """Hangs, and takes its time to put itself away when it is cancelled."""
    DEAF_ONCE = "deaf once"
    """Hangs, swallows its first cancellation and then gives its result after all."""
    DEAF = "deaf"
    """Hangs, and swallows every cancellation until the curtain falls."""
    CANCELS_ITSELF = "cancels itself"
    CANCELS_ITS_TASK = "cancels its task"
    EXITS = "exits"
    """Calls `sys.exit()`, as scripts do that were never meant to be imported."""
    BLOCKS = "blocks"
    """Lets time pass and nobody else have a turn."""
    DOWN = "down"
    """Says that the infrastructure behind it is gone."""


GOOD = (Mood.PROMPT, Mood.SLOW)
DEAF_MOODS = (Mood.DEAF_ONCE, Mood.DEAF, Mood.SLOW_TO_GO)


@dataclass(slots=True)
class Visit:
    """One call of other people's code."""

    who: str
    what: str
    episode: Episode | None
    mood: Mood
    began: float
    asked_to_end: float | None = None
    ended: float | None = None
    gave: Any = None
    raised: str | None = None
    inside: list[tuple[Gauge, Any]] = field(default_factory=list)

    @property
    def heard(self) -> float | None:
        """When it was over, or was first told that it should be."""
        times = [t for t in (self.asked_to_end, self.ended) if t is not None]
        return min(times) if times else None


class Gauge:
    """Counts who is inside, and tells when there are more than `limit`."""

    def __init__(self, stage: Stage, name: str, limit: int | None) -> None:
        self.stage, self.name, self.limit = stage, name, limit
        self.inside: defaultdict[Any, int] = defaultdict(int)
        self.most = 0

    def enter(self, key: Any) -> None:
        self.inside[key] += 1
        self.most = max(self.most, len(self.inside))
        if self.limit is not None and len(self.inside) > self.limit:
            self.stage.broken(f"{self.name}: {len(self.inside)} inside, and the limit is {self.limit}")

    def leave(self, key: Any) -> None:
        self.inside[key] -= 1
        if self.inside[key] <= 0:
            del self.inside[key]


class Stage:
    """The record of one run. Everything that happens goes into `events`; what must not happen into `violations`, since
    an exception would be taken for one more fault of other people's code."""

    def __init__(self, seed: int, *, faults: float) -> None:
        self.seed, self.faults = seed, faults
        self.events: list[tuple[float, str, str]] = []
        self.violations: list[str] = []
        self.visits: list[Visit] = []
        self.odd: set[Episode] = set()
        """Episodes in which somebody gave what makes no sense."""
        self.curtain = asyncio.Event()
        self._awaited: tuple[int, asyncio.Event] | None = None
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.loop = loop

    @property
    def now(self) -> float:
        return self.loop.time()

    def note(self, who: str, what: str) -> None:
        self.events.append((self.now, who, what))
        if self._awaited is not None and len(self.events) >= self._awaited[0]:
            self._awaited[1].set()

    async def until(self, events: int) -> None:
        """So many things have happened."""
        if len(self.events) < events:
            self._awaited = (events, asyncio.Event())
            await self._awaited[1].wait()

    def broken(self, words: str) -> None:
        self.violations.append(f"at {self.now:g} s: {words}")

    def chance(self, *what: object) -> random.Random:
        """Draws that depend on the seed and on what they are for, not on the order of events."""
        return random.Random(f"{self.seed}/{what}")

    def draw(self, *what: object, moods: tuple[Mood, ...]) -> tuple[Mood, float]:
        chance = self.chance(*what)
        if chance.random() < self.faults:
            return chance.choice(moods), round(chance.choice((0.0, 0.05, 0.4, 0.9, 3.0)), 3)
        mood = chance.choice(GOOD)
        return mood, 0.0 if mood is Mood.PROMPT else round(chance.expovariate(8.0), 3)

    async def visit(
        self,
        who: str,
        what: str,
        episode: Episode | None,
        moods: tuple[Mood, ...],
        *gauges: tuple[Gauge, Any],
        turn: int = 0,
    ) -> Visit:
        """Be there for as long as the mood has it; raises, hangs and swallows cancellations as that has it."""
        mood, nap_s = self.draw(who, what, turn, moods=moods)
        visit = Visit(who, what, episode, mood, self.now, inside=list(gauges))
        self.visits.append(visit)
        self.note(who, f"{what}: {mood}")
        for gauge, key in gauges:
            gauge.enter(key)
        try:
            await self._live(visit, nap_s)
        except BaseException as fault:
            visit.raised = type(fault).__name__
            raise
        finally:
            self._leave(visit)
            visit.ended = self.now
            self.note(who, f"{what} ended, {visit.raised or 'well'}")
        return visit

    def _leave(self, visit: Visit) -> None:
        while visit.inside:
            gauge, key = visit.inside.pop()
            gauge.leave(key)

    async def _live(self, visit: Visit, nap_s: float) -> None:
        mood = visit.mood
        try:
            if mood in (Mood.HANGS, *DEAF_MOODS):
                await self.curtain.wait()
            elif mood is Mood.BLOCKS:
                self.loop.stall(nap_s)
            elif nap_s or mood in (Mood.SLOW, Mood.DIES):
                await asyncio.sleep(nap_s)
        except asyncio.CancelledError:
            visit.asked_to_end = self.now
            self.note(visit.who, f"{visit.what} is asked to end")
            self._leave(visit)  # from now on it does not count: who does not heed this is abandoned, and replaced
            if mood not in DEAF_MOODS:
                raise
            if mood is Mood.DEAF:
                await self._until_the_curtain()
            else:
                await asyncio.sleep(nap_s if mood is Mood.DEAF_ONCE else min(nap_s, 0.9))
                if mood is Mood.SLOW_TO_GO:
                    raise
        if mood is Mood.RAISES:
            raise OSError("broken")
        if mood is Mood.DIES:
            raise ConnectionResetError("gone in the middle")
        if mood is Mood.EXITS:
            raise SystemExit(3)
        if mood is Mood.DOWN:
            raise ToolCallError("the server is down", SERVER_DOWN)
        if mood is Mood.CANCELS_ITSELF:
            raise asyncio.CancelledError
        if mood is Mood.CANCELS_ITS_TASK:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)

    async def _until_the_curtain(self) -> None:
        while not self.curtain.is_set():
            try:
                await self.curtain.wait()
            except asyncio.CancelledError:
                continue
