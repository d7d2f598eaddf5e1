"""A cluster in one process and in virtual time: deaths, delays, hung calls and partitions out of a seed, so that
supervision can be tested over thousands of schedules."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from toolwise.cluster.interface import (
    CallTimeoutError,
    Payload,
    Process,
    ProcessDiedError,
    ProcessExit,
    Resources,
    Stored,
    StoreFullError,
    check_payload,
    payload_bytes,
)
from toolwise.concurrency.tasks import spawn


class Handler(Protocol):
    """What a process does; its methods take and return payloads."""

    async def handle(self, method: str, payload: Payload) -> Payload: ...


@dataclass(frozen=True, slots=True)
class Weather:
    """What goes wrong, and how often."""

    deaths_per_s: float = 0.0
    """Rate at which each process dies."""
    node_deaths_per_s: float = 0.0
    max_delay_s: float = 0.0
    """Each way of a call takes up to this long."""
    lost: float = 0.0
    """Chance that a call or its reply never arrives: a partition."""
    failed_starts: float = 0.0
    hung_starts: float = 0.0
    """Chance that a start never ends."""
    full_store: float = 0.0
    """Chance that the object store has no room until the deadline."""


@dataclass(eq=False, slots=True)
class _Simulated:
    process: Process
    handler: Handler
    node: int
    dead: asyncio.Future[str]
    calls: set[asyncio.Task[Payload]] = field(default_factory=set)


class SimulatedCluster:
    """`roles` build the handler of each role from the payload that a process is started with."""

    def __init__(
        self, roles: Mapping[str, Callable[[Payload], Handler]], weather: Weather, *, nodes: int = 2, seed: int = 0
    ) -> None:
        self.roles, self.weather, self.node_count = roles, weather, nodes
        self.chance = random.Random(f"cluster/{seed}")
        self.processes: dict[Process, _Simulated] = {}
        self.started = 0
        self._listeners: list[asyncio.Queue[ProcessExit]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(
        self,
        role: str,
        name: str,
        payload: Payload,
        resources: Resources,
        *,
        deadline_s: float,
        stored: Stored | None = None,
    ) -> Process:
        check_payload(payload)
        await self._delay()
        if self.chance.random() < self.weather.failed_starts:
            raise ProcessDiedError(f"{name} died while it started")
        if self.chance.random() < self.weather.hung_starts:
            await asyncio.sleep(deadline_s)
            raise CallTimeoutError(f"{name} did not start within {deadline_s:g} s")
        self.started += 1
        process = Process(self.started, name)
        given = {**payload, **(stored.reference if stored is not None else {})}
        dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        simulated = _Simulated(process, self.roles[role](given), self.chance.randrange(self.node_count), dead)
        self.processes[process] = simulated
        self._spawn(self._die_some_time(simulated, self.weather.deaths_per_s))
        return process

    async def call(
        self, process: Process, method: str, payload: Payload, *, deadline_s: float, stored: Stored | None = None
    ) -> Payload:
        simulated = self.processes[process]
        given = check_payload({**payload, **(stored.reference if stored is not None else {})})
        work = spawn(self._reply(simulated, method, given))
        simulated.calls.add(work)
        work.add_done_callback(simulated.calls.discard)
        try:
            waited: list[asyncio.Future[Any]] = [work, simulated.dead]
            done, _ = await asyncio.wait(waited, timeout=deadline_s, return_when="FIRST_COMPLETED")
        finally:
            if not work.done():
                work.cancel()
        if simulated.dead.done():
            raise ProcessDiedError(f"{process.name} died: {simulated.dead.result()}")
        if not done:
            raise CallTimeoutError(f"{process.name} did not answer {method} within {deadline_s:g} s")
        return work.result()

    async def _reply(self, simulated: _Simulated, method: str, payload: Payload) -> Payload:
        await self._delay()
        await self._maybe_lose()
        reply = check_payload(await simulated.handler.handle(method, payload))
        await self._delay()
        await self._maybe_lose()
        return reply

    async def address(self, process: Process, *, deadline_s: float) -> str:
        return "127.0.0.1"

    async def kill(self, process: Process) -> None:
        self.end(process, "killed")

    def end(self, process: Process, reason: str) -> None:
        """The process ends now; its calls raise."""
        simulated = self.processes[process]
        if simulated.dead.done():
            return
        simulated.dead.set_result(reason)
        for call in simulated.calls:
            call.cancel()
        for listener in self._listeners:
            listener.put_nowait(ProcessExit(process, reason))

    def end_node(self, node: int) -> None:
        for simulated in list(self.processes.values()):
            if simulated.node == node:
                self.end(simulated.process, f"node {node} died")

    async def events(self) -> AsyncIterator[ProcessExit]:
        queue: asyncio.Queue[ProcessExit] = asyncio.Queue()
        self._listeners.append(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._listeners.remove(queue)

    async def store(self, payload: Payload, *, deadline_s: float) -> Stored:
        if self.chance.random() < self.weather.full_store:
            await asyncio.sleep(deadline_s)
            raise StoreFullError(f"the object store was full for {deadline_s:g} s")
        copied = {name: v.copy() if isinstance(v, np.ndarray) else v for name, v in check_payload(payload).items()}
        return Stored(copied, payload_bytes(payload))

    def show(self, process: str, counters: Mapping[str, float]) -> None:
        return

    async def close(self) -> None:
        for process in list(self.processes):
            self.end(process, "closed")
        for task in self._tasks:
            task.cancel()

    @property
    def alive(self) -> list[Process]:
        return [process for process, simulated in self.processes.items() if not simulated.dead.done()]

    def start_node_deaths(self) -> None:
        for node in range(self.node_count):
            self._spawn(self._node_deaths(node))

    async def _node_deaths(self, node: int) -> None:
        while self.weather.node_deaths_per_s:
            await asyncio.sleep(self.chance.expovariate(self.weather.node_deaths_per_s))
            self.end_node(node)

    async def _die_some_time(self, simulated: _Simulated, rate: float) -> None:
        if rate:
            await asyncio.sleep(self.chance.expovariate(rate))
            self.end(simulated.process, "crashed")

    async def _delay(self) -> None:
        if self.weather.max_delay_s:
            await asyncio.sleep(self.chance.uniform(0.0, self.weather.max_delay_s))

    async def _maybe_lose(self) -> None:
        if self.chance.random() < self.weather.lost:
            await asyncio.get_running_loop().create_future()

    def _spawn(self, work: Any) -> None:
        task = spawn(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
