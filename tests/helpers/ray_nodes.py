"""A Ray cluster of several nodes on this machine, each with its own raylet and object store, runs on it, and what kills
them. Ray reads its token once, so this is a program: `python ray_nodes.py demo SEED OUT`, `… kills SEED CONFIG OUT`."""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NODES, CPUS, STORE_BYTES = 3, 2, 100 << 20
LEARNERS, WORKERS = 2, 3
KILLS = ("worker", "learner", "node")
WAIT_S = 600.0


class RayNodes:
    """A head, which runs no process of ours, and other nodes. Ends with the block."""

    def __init__(self) -> None:
        self.environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}

    def __enter__(self) -> RayNodes:
        os.environ.update(self.environment)
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes = [self.add() for _ in range(NODES)]
        return self

    def add(self) -> Any:
        return self.cluster.add_node(num_cpus=CPUS, object_store_memory=STORE_BYTES)

    def kill(self, node: Any) -> None:
        """Kill all its processes, and start another node in its place."""
        self.cluster.remove_node(node, allow_graceful=False)
        self.nodes[self.nodes.index(node)] = self.add()

    def run(self, *arguments: object) -> subprocess.Popen[str]:
        """`toolwise` with these arguments, on this cluster."""
        settings = {"address": self.cluster.address, "learners": LEARNERS, "workers": WORKERS}
        options = [option for name, value in settings.items() for option in ("--set", f"cluster.{name}={value}")]
        command = [sys.executable, "-m", "toolwise", *map(str, arguments), *options]
        return subprocess.Popen(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def __exit__(self, *_: object) -> None:
        self.cluster.shutdown()


def events(out: Path) -> list[dict[str, Any]]:
    path = out / "cluster.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def living(out: Path, kind: str) -> list[int]:
    """The processes of a kind, such as "worker", that say they are there."""
    latest = {e["process"]: e["pid"] for e in events(out) if "pid" in e and e["process"].startswith(kind)}
    return [pid for pid in latest.values() if Path(f"/proc/{pid}").exists()]


def kill_one(nodes: RayNodes, kind: str, out: Path, chance: random.Random) -> bool:
    """Whether there was one to kill."""
    if kind == "node":
        nodes.kill(chance.choice(nodes.nodes))
        return True
    if not (pids := living(out, kind)):
        return False
    os.kill(chance.choice(pids), signal.SIGKILL)
    return True


def kill_at_random(nodes: RayNodes, run: subprocess.Popen[str], out: Path, chance: random.Random) -> list[str]:
    """One of each kind, in random order; which were killed before the run ended. Each time the run must first have got
    somewhere: a group has come back since the last kill."""
    killed: list[str] = []
    for kind in chance.sample(KILLS, len(KILLS)):
        seen, until = sum(e["event"] == "group" for e in events(out)), time.monotonic() + WAIT_S
        while run.poll() is None and sum(e["event"] == "group" for e in events(out)) <= seen:
            if time.monotonic() > until:
                run.kill()
                raise AssertionError(f"nothing moves after {killed}")
            time.sleep(0.2)
        time.sleep(chance.uniform(0.0, 6.0))
        if run.poll() is None and kill_one(nodes, kind, out, chance):
            killed.append(kind)
    return killed


def train_demo(seed: int, out: Path) -> None:
    with RayNodes() as nodes:
        run = nodes.run("demo", "--seed", seed, "--out", out, "--no-frontier")
        said, _ = run.communicate()
        assert run.returncode == 0, said


def train_with_kills(seed: int, config: Path, out: Path) -> None:
    """Prints which were killed."""
    chance = random.Random(f"kills/{seed}")
    with RayNodes() as nodes:
        run = nodes.run("train", config, "--out", out)
        killed = kill_at_random(nodes, run, out, chance)
        said, _ = run.communicate(timeout=WAIT_S)
        assert run.returncode == 0, said
    print(json.dumps(killed))


if __name__ == "__main__":
    job, *arguments = sys.argv[1:]
    if job == "demo":
        train_demo(int(arguments[0]), Path(arguments[1]))
    else:
        train_with_kills(int(arguments[0]), Path(arguments[1]), Path(arguments[2]))
