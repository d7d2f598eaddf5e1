"""`Cluster` with plain processes of this machine, for measurements where Ray is not installed. Stored payloads are
files that the processes map, as in Ray's object store."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from toolwise.cluster.interface import (
    CallTimeoutError,
    Payload,
    Process,
    ProcessDiedError,
    ProcessExit,
    RefusedError,
    RemoteCallError,
    Resources,
    Stored,
    check_payload,
    payload_bytes,
)
from toolwise.cluster.roles import FAILED, REFUSED, RoleHost
from toolwise.concurrency.tasks import spawn

MEMORY = Path("/dev/shm")
NEEDED = 16 << 30


def serve(connection: Connection, role: str, name: str) -> None:
    """The main function of a process: answers calls until the connection ends."""

    async def run() -> None:
        host, loop, calls = RoleHost(role, name), asyncio.get_running_loop(), asyncio.Queue[Any]()

        def read() -> None:
            while True:
                try:
                    message = connection.recv()
                except (EOFError, OSError):
                    message = None
                loop.call_soon_threadsafe(calls.put_nowait, message)
                if message is None:
                    return

        async def answer(number: int, method: str | None, payload: Payload, stored: Any) -> None:
            given = None if stored is None else read_file(*stored)
            reply = await (host.setup(payload, given) if method is None else host.call(method, payload, given))
            connection.send((number, reply))

        threading.Thread(target=read, daemon=True).start()
        under_way: set[asyncio.Task[None]] = set()
        while (message := await calls.get()) is not None:
            task = spawn(answer(*message))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
        await host.end()

    with suppress(KeyboardInterrupt):
        asyncio.run(run())


def write_file(path: Path, payload: Payload) -> list[tuple[Any, ...]]:
    """Write the payload; where each part of it is."""
    index: list[tuple[Any, ...]] = []
    with path.open("wb") as file:
        for name, value in payload.items():
            if isinstance(value, int | float):
                index.append((name, value, 0, 0))
                continue
            file.seek(-file.tell() % 8, os.SEEK_CUR)
            data = value if isinstance(value, bytes) else np.ascontiguousarray(value).data
            kind = "bytes" if isinstance(value, bytes) else value.dtype.str
            index.append((name, kind, file.tell(), len(value)))
            file.write(data)
    return index


def read_file(path: str, index: list[tuple[Any, ...]]) -> dict[str, Any]:
    data = np.memmap(path, np.uint8, mode="r") if os.path.getsize(path) else np.zeros(0, np.uint8)
    found: dict[str, Any] = {}
    for name, kind, start, length in index:
        if not isinstance(kind, str):
            found[name] = kind
        elif kind == "bytes":
            found[name] = data[start : start + length].tobytes()
        else:
            found[name] = np.frombuffer(data, np.dtype(kind), length, start)
    return found


class PlainCluster:
    """Processes die with this one, whose connections they lose."""

    def __init__(self) -> None:
        roomy = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > NEEDED
        self.folder = Path(tempfile.mkdtemp(dir=MEMORY if roomy else None))
        self._numbers = count(1)
        self._processes: dict[Process, tuple[Any, Connection]] = {}
        self._waiting: dict[Process, dict[int, asyncio.Future[Any]]] = {}
        self._exits: asyncio.Queue[ProcessExit] = asyncio.Queue()

    async def start(
        self, role: str, name: str, payload: Payload, resources: Resources, *, deadline_s: float, stored: Stored | None
    ) -> Process:
        context, process = multiprocessing.get_context("spawn"), Process(next(self._numbers), name)
        ours, theirs = context.Pipe()
        started = context.Process(target=serve, args=(theirs, role, name))
        started.start()
        theirs.close()
        self._processes[process], self._waiting[process] = (started, ours), {}
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(process, ours, loop), daemon=True).start()
        await self._ask(process, None, payload, deadline_s, stored)
        return process

    def _read(self, process: Process, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            try:
                message = connection.recv()
            except (EOFError, OSError):
                message = None
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._take, process, message)
            if message is None:
                return

    def _take(self, process: Process, message: Any) -> None:
        waiting = self._waiting[process]
        if message is None:
            for future in waiting.values():
                if not future.done():
                    future.set_exception(ProcessDiedError(f"{process.name} died"))
            self._exits.put_nowait(ProcessExit(process, "its connection ended"))
        elif (future := waiting.pop(message[0], None)) is not None and not future.done():
            future.set_result(message[1])

    async def call(
        self, process: Process, method: str, payload: Payload, *, deadline_s: float, stored: Stored | None = None
    ) -> Payload:
        return await self._ask(process, method, payload, deadline_s, stored)

    async def _ask(
        self, process: Process, method: str | None, payload: Payload, deadline_s: float, stored: Stored | None
    ) -> Payload:
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[process][number] = future
        reference = None if stored is None else stored.reference.place
        message = (number, method, dict(check_payload(payload)), reference)
        try:
            await asyncio.to_thread(self._processes[process][1].send, message)
            reply = await asyncio.wait_for(future, deadline_s)
        except TimeoutError:
            raise CallTimeoutError(f"{process.name} did not answer {method} within {deadline_s:g} s") from None
        except (BrokenPipeError, OSError) as fault:
            raise ProcessDiedError(f"{process.name} died: {fault}") from None
        if REFUSED in reply:
            raise RefusedError(reply[REFUSED].decode())
        if FAILED in reply:
            raise RemoteCallError(reply[FAILED].decode())
        return check_payload(reply)

    async def address(self, process: Process, *, deadline_s: float) -> str:
        return "127.0.0.1"

    async def kill(self, process: Process) -> None:
        if (found := self._processes.pop(process, None)) is not None:
            found[1].close()
            await asyncio.to_thread(found[0].join, 10.0)
            found[0].kill()

    async def events(self) -> AsyncIterator[ProcessExit]:
        while True:
            yield await self._exits.get()

    async def store(self, payload: Payload, *, deadline_s: float) -> Stored:
        path = self.folder / str(next(self._numbers))
        index = await asyncio.to_thread(write_file, path, check_payload(payload))
        return Stored(StoredFile(path, index), payload_bytes(payload))

    def show(self, process: str, counters: Mapping[str, float]) -> None:
        return

    async def close(self) -> None:
        for process in list(self._processes):
            await self.kill(process)
        shutil.rmtree(self.folder, ignore_errors=True)


class StoredFile:
    """Deleted when nothing refers to it."""

    def __init__(self, path: Path, index: list[tuple[Any, ...]]) -> None:
        self.place = str(path), index
        self._path = path

    def __del__(self) -> None:
        self._path.unlink(missing_ok=True)
