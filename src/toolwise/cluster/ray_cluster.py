"""`Cluster` on Ray: each process is an actor, the object store holds weights. Ray is imported here alone."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

from toolwise.cluster.interface import (
    CallTimeoutError,
    ClusterError,
    Payload,
    Process,
    ProcessDiedError,
    ProcessExit,
    RefusedError,
    RemoteCallError,
    Resources,
    Stored,
    StoreFullError,
    check_payload,
    payload_bytes,
)
from toolwise.cluster.roles import FAILED, REFUSED, RoleHost
from toolwise.concurrency.tasks import spawn
from toolwise.config.cluster import ClusterConfig
from toolwise.errors import ConfigError, import_extra

log = logging.getLogger("toolwise.cluster")

MAX_CALLS = 1000
"""Calls of one process at a time; the pool sends fewer."""
RETRY_S = 0.5
PROBE_S = 60.0
CONNECT = "import ray, sys; ray.init(sys.argv[1], log_to_driver=False)"
END_S = 10.0
"""How long a process may take to stop what it started and to delete its files."""
DEAD = (
    "RayActorError",
    "ObjectLostError",
    "WorkerCrashedError",
    "NodeDiedError",
    "LocalRayletDiedError",
    "OutOfMemoryError",
)
"""Ray's errors for calls whose process, or its node, has ended."""


class RayHost(RoleHost):
    """A process of the cluster, as an actor."""

    async def address(self) -> dict[str, Any]:
        return {"address": str(import_extra("ray.util", "ray").get_node_ip_address()).encode()}


class RayCluster:
    """Connects to the cluster of the configuration, or starts one on this machine."""

    def __init__(self, config: ClusterConfig) -> None:
        require_token(config.address)
        self.ray = import_extra("ray", "ray")
        self.local = config.local
        self._owned = not self.ray.is_initialized()
        self._session: str | None = None
        """Folder of the cluster that this started."""
        if self._owned:
            self._connect(config)
        self._actors: dict[Process, Any] = {}
        self._gauges: dict[str, Any] = {}
        self._started = 0
        self._listeners: list[tuple[asyncio.AbstractEventLoop, asyncio.Queue[ProcessExit]]] = []
        self._watchers: dict[Process, asyncio.Task[None]] = {}

    def _connect(self, config: ClusterConfig) -> None:
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        try:
            if not config.local:
                self.ray.init(address=config.address, **quiet)
                self._refuse_open(config.address)
                return
            context = self.ray.init(
                address="local",
                num_cpus=max(1, round(config.workers * config.worker_cpus + config.learners * config.learner_cpus + 1)),
                object_store_memory=config.object_store_mb * 2**20,
                include_dashboard=False,
                **quiet,
            )
            self._session = context.address_info["session_dir"]
        except ClusterError:
            self.ray.shutdown()
            raise
        except Exception as fault:  # Ray raises many kinds, also plain ones: a node that takes long to start
            reason = _first_line(fault)
            raise ClusterError(f"cluster.address = {config.address!r}: Ray cannot be reached ({reason})") from fault

    def _refuse_open(self, address: str) -> None:
        """Raise if the cluster answers a process that has no token: its nodes were started without authentication."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
        if address.startswith("ray://"):  # the head's own address may be one that is not reached from here
            command = [sys.executable, "-c", CONNECT, address]
        else:
            head = self.ray.get_runtime_context().gcs_address
            command = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", head]
        try:
            ended = subprocess.run(
                command,
                env={**environment, "RAY_AUTH_MODE": "disabled"},
                capture_output=True,
                check=False,
                timeout=PROBE_S,
            )
        except subprocess.TimeoutExpired:
            return  # it keeps asking, in vain
        if ended.returncode == 0:
            raise ClusterError(
                f"cluster.address = {address!r}: the cluster was started without authentication, so that anyone who "
                "reaches it runs code on it; start its nodes with RAY_AUTH_MODE=token: docs/cluster.md"
            )

    # --- processes

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
        actor_class = self.ray.remote(RayHost).options(
            num_cpus=resources.cpus,
            num_gpus=resources.gpus,
            max_concurrency=MAX_CALLS,
            max_restarts=0,
            scheduling_strategy=self._strategy(resources),
        )
        self._started += 1
        process, actor = Process(self._started, name), actor_class.remote(role, name)
        self._actors[process] = actor
        try:
            reference = actor.setup.remote(dict(check_payload(payload)), stored and stored.reference)
            await self._reply(process, reference, f"start of {name}", deadline_s)
        except BaseException:
            await self.kill(process)
            raise
        self._watchers[process] = spawn(self._watch(process, actor))
        return process

    def _strategy(self, resources: Resources) -> Any:
        if not resources.node:
            return "SPREAD"
        strategies = import_extra("ray.util.scheduling_strategies", "ray")
        return strategies.NodeAffinitySchedulingStrategy(resources.node, soft=False)

    async def call(
        self, process: Process, method: str, payload: Payload, *, deadline_s: float, stored: Stored | None = None
    ) -> Payload:
        if (actor := self._actors.get(process)) is None:
            raise ProcessDiedError(f"{process.name} has ended")
        reference = actor.call.remote(method, dict(check_payload(payload)), stored and stored.reference)
        return await self._reply(process, reference, method, deadline_s)

    async def address(self, process: Process, *, deadline_s: float) -> str:
        """As its node was started with; of a cluster on this machine alone the one that no other machine reaches."""
        if self.local:
            return "127.0.0.1"
        reply = await self._reply(process, self._actors[process].address.remote(), "its address", deadline_s)
        return bytes(reply["address"]).decode()  # type: ignore[arg-type]

    async def _reply(self, process: Process, reference: Any, what: str, deadline_s: float) -> Payload:
        errors = self.ray.exceptions
        dead = tuple(getattr(errors, name) for name in DEAD)
        try:
            async with asyncio.timeout(deadline_s):
                reply: dict[str, Any] = await _result(reference)
        except TimeoutError:
            self.ray.cancel(reference)
            raise CallTimeoutError(f"{process.name} did not answer {what} within {deadline_s:g} s") from None
        except asyncio.CancelledError:
            self.ray.cancel(reference)
            raise
        except dead as fault:
            raise ProcessDiedError(f"{process.name} died: {_first_line(fault)}") from None
        except errors.RayError as fault:
            raise RemoteCallError(f"{process.name}, {what}: {_first_line(fault)}") from None
        if REFUSED in reply:
            raise RefusedError(f"{process.name}: {reply[REFUSED].decode(errors='replace')}")
        if FAILED in reply:
            raise _remote_error(process.name, reply[FAILED].decode(errors="replace"))
        return check_payload(reply)

    async def kill(self, process: Process) -> None:
        """It may delete its files first. Its end is no event: whoever kills it knows."""
        watcher = self._watchers.pop(process, None)
        if watcher is not None and not watcher.get_loop().is_closed():  # perhaps that of another thread
            watcher.get_loop().call_soon_threadsafe(watcher.cancel)
        if (actor := self._actors.pop(process, None)) is None:
            return
        try:
            async with asyncio.timeout(END_S):
                await _result(actor.end.remote())
        except (TimeoutError, self.ray.exceptions.RayError):
            log.info("%s did not end by itself", process.name)
        finally:
            self.ray.kill(actor, no_restart=True)

    async def _watch(self, process: Process, actor: Any) -> None:
        try:
            await _result(actor.wait.remote())
        except self.ray.exceptions.RayError as fault:
            exited = ProcessExit(process, _first_line(fault))
            for loop, queue in self._listeners:
                loop.call_soon_threadsafe(queue.put_nowait, exited)

    async def events(self) -> AsyncIterator[ProcessExit]:
        listener = asyncio.get_running_loop(), asyncio.Queue[ProcessExit]()
        self._listeners.append(listener)
        try:
            while True:
                yield await listener[1].get()
        finally:
            self._listeners.remove(listener)

    # --- values

    async def store(self, payload: Payload, *, deadline_s: float) -> Stored:
        """Ray spills to the disk when the store is full; if that is full, too, wait for others to free their part."""
        full = (self.ray.exceptions.ObjectStoreFullError, self.ray.exceptions.OutOfDiskError)
        loop = asyncio.get_running_loop()
        until = loop.time() + deadline_s
        while True:
            try:
                reference = await asyncio.to_thread(self.ray.put, dict(check_payload(payload)))  # which may wait
                return Stored(reference, payload_bytes(payload))
            except full as fault:
                if loop.time() > until:
                    raise StoreFullError(f"the object store was full for {deadline_s:g} s") from fault
                await asyncio.sleep(RETRY_S)

    def show(self, process: str, counters: Mapping[str, float]) -> None:
        """As gauges, for Ray's dashboard and its Prometheus endpoints: engine/blocks is toolwise_engine_blocks."""
        metrics = import_extra("ray.util.metrics", "ray")
        for name, value in counters.items():
            if name not in self._gauges:
                self._gauges[name] = metrics.Gauge(
                    f"toolwise_{re.sub('[^a-zA-Z0-9]', '_', name)}", description=name, tag_keys=("process",)
                )
            self._gauges[name].set(float(value), tags={"process": process})

    async def close(self) -> None:
        await asyncio.gather(*(self.kill(process) for process in list(self._actors)))
        if self._owned:
            self.ray.shutdown()
        if self._session is not None:
            shutil.rmtree(self._session, ignore_errors=True)

    def nodes(self) -> list[dict[str, Any]]:
        """The nodes that are alive: id, address and resources."""
        return [
            {"id": node["NodeID"], "address": node["NodeManagerAddress"], "resources": node["Resources"]}
            for node in self.ray.nodes()
            if node["Alive"]
        ]


def require_token(address: str) -> None:
    """Raise unless the processes of the cluster must show a token: whoever reaches a Ray cluster without one runs code
    on it. A local cluster, which other machines may reach (Ray listens on all interfaces), gets
    a token of its own."""
    if address == "local" and "ray" not in sys.modules:  # Ray reads the environment when it is imported
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        if "RAY_AUTH_TOKEN_PATH" not in os.environ:
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    if os.environ.get("RAY_AUTH_MODE") != "token":
        raise ConfigError(
            f"cluster.address = {address!r}: anyone who reaches a Ray cluster without authentication runs code on it; "
            "set RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN on every node, before Ray is imported: docs/cluster.md"
        )


async def _result(reference: Any) -> Any:
    """As `await reference`, which would cancel Ray's future if the caller is cancelled: Ray's client (ray://) sets its
    result all the same, and fails."""
    loop = asyncio.get_running_loop()
    waited: asyncio.Future[Any] = loop.create_future()

    def take(source: concurrent.futures.Future[Any]) -> None:
        if not waited.done():
            fault = source.exception()
            waited.set_result(source.result()) if fault is None else waited.set_exception(fault)

    def tell(source: concurrent.futures.Future[Any]) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(take, source)

    reference.future().add_done_callback(tell)
    return await waited


def _first_line(fault: BaseException) -> str:
    lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
    return lines[0] if lines else type(fault).__name__


def _remote_error(name: str, text: str) -> RemoteCallError:
    """One line, with the traceback of the process as a note."""
    lines = text.strip().splitlines()
    error = RemoteCallError(f"{name}: {lines[-1] if lines else 'failed'}")
    if len(lines) > 1:
        error.add_note(text)
    return error
