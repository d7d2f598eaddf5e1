"""The cluster on real Ray: processes, deaths, the object store, and a training run whose worker is killed."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from toolwise import Callback
from toolwise.cluster.interface import (
    CallTimeoutError,
    ClusterError,
    ProcessDiedError,
    ProcessExit,
    RemoteCallError,
    Resources,
)
from toolwise.cluster.node_report import differences, node_facts, report_nodes
from toolwise.cluster.ray_cluster import RayCluster, require_token
from toolwise.config.cluster import ClusterConfig
from toolwise.errors import ConfigError

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs ray: pip install 'toolwise[ray]'")

LOCAL = ClusterConfig(address="local", workers=2, worker_cpus=0.5, object_store_mb=100)
SMALL = Resources(cpus=0.1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    started = RayCluster(LOCAL)
    yield started
    asyncio.run(started.close())


def test_processes_are_called_killed_and_their_ends_heard_of(cluster: RayCluster) -> None:
    async def work() -> None:
        heard: asyncio.Queue[ProcessExit] = asyncio.Queue()

        async def listen() -> None:
            async for exited in cluster.events():
                heard.put_nowait(exited)

        listener = asyncio.create_task(listen())
        process = await cluster.start("node", "echo", {}, SMALL, deadline_s=60.0, stored=None)
        stored = await cluster.store({"weights": np.arange(200_000)}, deadline_s=10.0)
        reply = await cluster.call(process, "echo", {"n": 3, "b": b"x"}, deadline_s=30.0, stored=stored)
        assert (reply["n"], reply["b"]) == (3, b"x")
        assert np.array_equal(reply["weights"], np.arange(200_000))
        with pytest.raises(RemoteCallError, match="no nothing"):
            await cluster.call(process, "nothing", {}, deadline_s=30.0)
        with pytest.raises(ClusterError, match="only bytes"):
            await cluster.call(process, "echo", {"f": object()}, deadline_s=30.0)  # type: ignore[dict-item]
        with pytest.raises(CallTimeoutError, match="did not answer sleep"):
            await cluster.call(process, "sleep", {"seconds": 60.0}, deadline_s=0.3)
        pid = int((await cluster.call(process, "pid", {}, deadline_s=30.0))["pid"])
        waiting = asyncio.create_task(cluster.call(process, "sleep", {"seconds": 60.0}, deadline_s=60.0))
        await asyncio.sleep(0.2)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ProcessDiedError, match="echo died"):
            await waiting
        exited = await asyncio.wait_for(heard.get(), 30.0)
        assert exited.process == process
        listener.cancel()

    asyncio.run(work())


@pytest.mark.long
def test_nodes_report_what_differs(cluster: RayCluster) -> None:
    reports = asyncio.run(report_nodes(cluster, cluster))
    assert len(reports) == 1
    assert differences(node_facts(), reports) == []
    [(name, facts)] = reports.items()
    assert differences({**node_facts(), "torch": "1.0"}, reports) == [f"{name}: torch is {facts['torch']}, here 1.0"]


@pytest.mark.long
def test_a_process_without_the_token_cannot_join(cluster: RayCluster) -> None:
    address = cluster.ray.get_runtime_context().gcs_address
    code = f"import ray; ray.init(address={address!r}); print('in')"
    for token, joins in ((os.environ["RAY_AUTH_TOKEN"], True), ("0" * 64, False)):
        environment = {**os.environ, "RAY_AUTH_TOKEN": token}
        ended = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=120
        )
        assert ("in" in ended.stdout.split()) == joins, ended.stderr[-2000:]


@pytest.mark.parametrize("address", ["auto", "10.0.0.1:6379", "ray://head:10001", "127.0.0.1:6379"])
def test_other_clusters_need_a_token(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(ConfigError, match="RAY_AUTH_MODE=token"):
        require_token(address)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    require_token(address)


class KillsWorker(Callback):
    """Kills a worker's process after the first step."""

    def on_step(self, event: Any) -> None:
        if event.step == 1:
            lines = (event.run_folder / "cluster.jsonl").read_text().splitlines()
            pids = [line["pid"] for line in map(json.loads, lines) if line["event"] == "counters"]
            os.kill(int(pids[0]), signal.SIGKILL)


def test_a_run_on_a_local_cluster_survives_the_death_of_a_worker(
    cluster: RayCluster, cli: Any, make_config: Any, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "cluster": {"workers": 2, "worker_cpus": 0.5},
        "rollout": {"n": 4},
        "trainer": {"total_steps": 2, "save_every": 2, "callbacks": [f"{__file__}:KillsWorker"]},
    }
    ended = cli("train", make_config(tmp_path, settings), "--cluster", "local", "--out", tmp_path / "run")
    assert ended.status == 0, ended.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 2
    events = [json.loads(line) for line in (tmp_path / "run" / "cluster.jsonl").read_text().splitlines()]
    assert sum(event["event"] == "death" for event in events) == 1
    assert {event["process"] for event in events if event["event"] == "group"} == {"worker-0", "worker-1"}


def free_ports(count: int) -> list[int]:
    """Below those that Ray gives to its workers."""
    found: list[int] = []
    for port in range(7300, 9900):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            break
    return found


@pytest.mark.long
def test_a_run_reaches_a_cluster_through_rays_client(make_config: Any, tmp_path: Path) -> None:
    """A head that was started by hand, with a token, and a driver that is no part of the cluster (ray://)."""
    port, client = free_ports(2)
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **token, "PYTHONPATH": os.pathsep.join(sys.path)}
    places = {"--port": port, "--ray-client-server-port": client, "--num-cpus": 4, "--object-store-memory": 200 << 20}
    options = [f"{name}={value}" for name, value in places.items()]
    changes = {"cluster": {"workers": 1, "worker_cpus": 0.5, "learners": 2, "learner_cpus": 0.5}}
    config, address = make_config(tmp_path, changes), f"ray://127.0.0.1:{client}"
    with TemporaryDirectory(prefix="ray-") as folder:  # of a short name, for sockets
        start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
        head = subprocess.Popen(
            [*start, *options, f"--temp-dir={folder}", "--include-dashboard=false"], env=environment
        )
        try:
            for command in (
                ["doctor", "--cluster", address],
                ["train", str(config), "--cluster", address, "--out", str(tmp_path / "run")],
            ):
                ended = subprocess.run(
                    [sys.executable, "-m", "toolwise", *command],
                    env=environment,
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=300,
                )
                assert ended.returncode in (0, 3), ended.stdout + ended.stderr  # 3: the run has findings
                assert "Traceback" not in ended.stderr
        finally:
            head.terminate()
            head.wait(60)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2
