"""Learners meet at the addresses that the cluster has for its nodes, whatever their host names resolve to."""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
import two_hosts
from cluster_cases import build, cluster_config
from two_hosts import ADDRESSES, TwoHosts

from toolwise.cluster.interface import ClusterError, Payload, Process, Stored
from toolwise.cluster.learner_group import LearnerGroup
from toolwise.cluster.learner_worker import LearnerWorker
from toolwise.cluster.node_files import pack_settings
from toolwise.cluster.rendezvous import interface_of, listen
from toolwise.cluster.simulated import SimulatedCluster, Weather
from toolwise.learner.actor import Actor


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(ClusterError, match=r"192\.0\.2\.1, the address of .* GLOO_SOCKET_IFNAME"):
        interface_of("192.0.2.1")


def test_an_address_that_this_machine_does_not_have_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"cannot listen at 192\.0\.2\.1.*--node-ip-address"):
        listen("192.0.2.1")


class OtherAddress(SimulatedCluster):
    """Its node is 127.0.0.2."""

    async def address(self, process: Process, *, deadline_s: float) -> str:
        return "127.0.0.2"


def test_learners_meet_at_the_nodes_address_and_not_at_its_host_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    connects: list[Payload] = []
    built: list[LearnerWorker] = []

    class Learner(LearnerWorker):
        def _connect(self, payload: Payload) -> Payload:
            assert self._listener is not None
            connects.append({**payload, "bound": self._listener.getsockname()[0].encode()})
            return super()._connect(payload)

    def build_learner(payload: Payload) -> LearnerWorker:
        built.append(Learner("learner-0", payload))
        return built[-1]

    config = cluster_config(cluster={"address": "local", "learners": 1})
    run = build(config)
    run.close()
    settings, files = pack_settings(config)
    cluster = OtherAddress({"learner": build_learner}, Weather())
    group = LearnerGroup(cluster, config, cast(Actor, run.learner), settings, Stored(files, 0))
    group.start()
    group.close()
    for worker in built:
        worker.close()
    [connect] = connects
    assert (connect["store"], connect["host"], connect["bound"]) == (b"127.0.0.2",) * 3


JOINED = """
import sys, time, ray
alive = 0
while alive < 2:
    time.sleep(1)
    try:
        ray.init(address=sys.argv[1], ignore_reinit_error=True, log_to_driver=False)
        alive = len([node for node in ray.nodes() if node["Alive"]])
    except ConnectionError as fault:
        print(fault)
"""


@pytest.mark.long
@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray: pip install 'toolwise[ray]'")
def test_learners_on_two_hosts_whose_names_resolve_to_loopback_addresses(make_config: Any, tmp_path: Path) -> None:
    """Each host has room for one of the two learners."""
    if problem := two_hosts.problem():
        pytest.skip(problem)
    first, second = ADDRESSES.values()
    address = f"{first}:6379"
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "GLOO_"))},
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
    }
    ray_start = (
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--block",
        "--disable-usage-stats",
        "--num-cpus=2",
    )
    changes = {
        "cluster": {"workers": 2, "worker_cpus": 0.5, "learners": 2, "learner_cpus": 1.5},
        "rollout": {"n": 4},
        "trainer": {"total_steps": 2},
        "validation": {"before": False},
    }
    config = make_config(tmp_path, changes)
    with TwoHosts(tmp_path, environment) as hosts:
        lookup = "import socket; print(socket.gethostbyname(socket.gethostname()))"
        assert hosts.run("toolwise-b", sys.executable, "-c", lookup, timeout=60.0).stdout.strip() == "127.0.1.1"
        head = ("--head", "--port=6379", f"--node-ip-address={first}", "--include-dashboard=false")
        hosts.start("toolwise-a", *ray_start, *head)
        hosts.start("toolwise-b", *ray_start, f"--address={address}", f"--node-ip-address={second}")
        joined = hosts.run("toolwise-a", sys.executable, "-c", JOINED, address, timeout=300.0)
        assert joined.returncode == 0, joined.stdout + joined.stderr
        program = (sys.executable, "-m", "toolwise", "train", config)
        ended = hosts.run("toolwise-a", *program, "--cluster", address, "--out", tmp_path / "run", timeout=550.0)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2
