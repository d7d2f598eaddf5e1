"""Ray's errors as those of the cluster, without Ray."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from toolwise.cluster import ray_cluster
from toolwise.cluster.interface import (
    CallTimeoutError,
    ClusterError,
    Process,
    ProcessDiedError,
    RemoteCallError,
    StoreFullError,
)
from toolwise.cluster.ray_cluster import DEAD, RayCluster


class RayError(Exception):
    pass


class Reference:
    """As Ray's references: `outcome` is the result or an error; None: it never comes."""

    def __init__(self, outcome: Any) -> None:
        self.coming: Future[Any] = Future()
        if isinstance(outcome, Exception):
            self.coming.set_exception(outcome)
        elif outcome is not None:
            self.coming.set_result(outcome)

    def future(self) -> Future[Any]:
        return self.coming


ERRORS = {name: type(name, (RayError,), {}) for name in (*DEAD, "RaySystemError")}


@pytest.mark.parametrize(
    ("name", "expected"),
    [("RayActorError", ProcessDiedError), ("NodeDiedError", ProcessDiedError), ("RaySystemError", RemoteCallError)],
)
def test_a_dead_node_is_a_dead_process(name: str, expected: type[Exception]) -> None:
    cluster = cast(Any, SimpleNamespace(ray=SimpleNamespace(exceptions=SimpleNamespace(RayError=RayError, **ERRORS))))
    reference = Reference(ERRORS[name]("gone"))
    with pytest.raises(expected, match="gone"):
        asyncio.run(RayCluster._reply(cluster, Process(1, "learner-0"), reference, "update", 1.0))


def test_a_call_that_is_given_up_leaves_rays_future_alone() -> None:
    """Ray's client sets its result later, in a thread of its own, which an error there would end."""
    cancelled: list[Any] = []
    ray = SimpleNamespace(cancel=cancelled.append, exceptions=SimpleNamespace(RayError=RayError, **ERRORS))
    cluster, reference = cast(Any, SimpleNamespace(ray=ray)), Reference(None)
    with pytest.raises(CallTimeoutError, match=r"worker-0 did not answer echo within 0\.01 s"):
        asyncio.run(RayCluster._reply(cluster, Process(1, "worker-0"), reference, "echo", 0.01))
    assert cancelled == [reference]
    reference.coming.set_result({})


class FullStore:
    """Of Ray, the object store alone; it has room after `full` attempts."""

    exceptions = SimpleNamespace(ObjectStoreFullError=MemoryError, OutOfDiskError=OSError)

    def __init__(self, full: float) -> None:
        self.full, self.tried = full, 0

    def put(self, payload: Any) -> str:
        self.tried += 1
        if self.tried <= self.full:
            raise MemoryError("full")
        return "stored"


def test_a_full_object_store_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "RETRY_S", 0.001)
    ray = FullStore(3)
    stored = asyncio.run(RayCluster.store(cast(Any, SimpleNamespace(ray=ray)), {"weights": b"1234"}, deadline_s=30.0))
    assert (stored.reference, stored.bytes, ray.tried) == ("stored", 4, 4)


def test_an_object_store_that_stays_full_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "RETRY_S", 0.001)
    cluster = cast(Any, SimpleNamespace(ray=FullStore(float("inf"))))
    with pytest.raises(StoreFullError, match=r"full for 0.05 s"):
        asyncio.run(RayCluster.store(cluster, {"weights": b"1234"}, deadline_s=0.05))


@pytest.mark.parametrize("address", ["10.0.0.1:6379", "ray://10.0.0.1:10001"])
@pytest.mark.parametrize(("status", "refused"), [(0, True), (1, False)])
def test_a_cluster_that_answers_without_a_token_is_refused(
    status: int, refused: bool, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever this process has set: the nodes may have been started without it."""
    environments = []

    def run(command: list[str], env: dict[str, str], **options: Any) -> Any:
        environments.append(env)
        return SimpleNamespace(returncode=status)

    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    monkeypatch.setattr(ray_cluster.subprocess, "run", run)
    context = SimpleNamespace(gcs_address="10.0.0.1:6379")
    cluster = cast(Any, SimpleNamespace(ray=SimpleNamespace(get_runtime_context=lambda: context)))
    with pytest.raises(ClusterError, match="started without authentication") if refused else nullcontext():
        RayCluster._refuse_open(cluster, address)
    assert "RAY_AUTH_TOKEN" not in environments[0]


class EndingActor:
    """Notes whether it could end before it was killed."""

    def __init__(self, hangs: bool) -> None:
        self.log: list[str] = []
        self.hangs = hangs
        self.end = SimpleNamespace(remote=self._end)

    def _end(self) -> Reference:
        if not self.hangs:
            self.log.append("ended")
        return Reference(None if self.hangs else {})

    def kill(self, actor: Any, **options: Any) -> None:
        self.log.append("killed")


@pytest.mark.parametrize(("hangs", "log"), [(False, ["ended", "killed"]), (True, ["killed"])])
def test_a_process_may_delete_its_files_before_it_is_killed(
    hangs: bool, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "END_S", 0.05)
    actor, process = EndingActor(hangs), Process(1, "worker-0")
    ray = SimpleNamespace(kill=actor.kill, exceptions=SimpleNamespace(RayError=RayError))

    async def watch() -> None:
        await asyncio.Event().wait()

    async def work() -> bool:
        watcher = asyncio.ensure_future(watch())
        cluster = cast(Any, SimpleNamespace(ray=ray, _actors={process: actor}, _watchers={process: watcher}))
        await RayCluster.kill(cluster, process)
        await RayCluster.kill(cluster, process)
        await asyncio.sleep(0.01)
        return watcher.cancelled()

    assert asyncio.run(work())
    assert actor.log == log


def test_counters_are_gauges_of_their_process(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[Any]] = {}

    class Gauge:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            assert tag_keys == ("process",)
            self.values = seen.setdefault(name, [])

        def set(self, value: float, tags: dict[str, str]) -> None:
            self.values.append((tags["process"], value))

    monkeypatch.setattr(ray_cluster, "import_extra", lambda *_: SimpleNamespace(Gauge=Gauge))
    cluster = cast(Any, SimpleNamespace(_gauges={}))
    for process, value in (("worker-0", 3), ("worker-1", 4.0)):
        RayCluster.show(cluster, process, {"engine/blocks": value})
    assert seen == {"toolwise_engine_blocks": [("worker-0", 3.0), ("worker-1", 4.0)]}
