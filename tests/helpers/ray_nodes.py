"""A Ray cluster of several nodes on this machine, each with its own raylet and object store, and runs on it. Also a program, which needs
no other test: `python tests/helpers/ray_nodes.py SEED OUT` trains the demo on four nodes."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

STORE_BYTES = 100 << 20


class RayNodes:
    """A head, which holds nothing, and `count` other nodes with `cpus` each. Ends with the block."""

    def __init__(self, count: int, cpus: int) -> None:
        self.count, self.cpus = count, cpus
        self.environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}

    def __enter__(self) -> RayNodes:
        os.environ.update(self.environment)  # Ray reads it when it is imported
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False},
        )
        self.nodes = [self.add() for _ in range(self.count)]
        return self

    def add(self) -> Any:
        return self.cluster.add_node(num_cpus=self.cpus, object_store_memory=STORE_BYTES)

    def kill(self, node: Any) -> None:
        """Kill all its processes, and start another node in its place."""
        self.cluster.remove_node(node, allow_graceful=False)
        self.nodes[self.nodes.index(node)] = self.add()

    def train(self, *arguments: str, learners: int, workers: int) -> subprocess.Popen[str]:
        """`toolwise` with these arguments, on this cluster."""
        settings = {"address": self.cluster.address, "learners": learners, "workers": workers}
        options = [option for name, value in settings.items() for option in ("--set", f"cluster.{name}={value}")]
        command = [sys.executable, "-m", "toolwise", *arguments, *options]
        return subprocess.Popen(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def __exit__(self, *_: object) -> None:
        self.cluster.shutdown()


def train_demo(seed: int, out: Path) -> None:
    with RayNodes(3, 2) as nodes:
        run = nodes.train("demo", "--seed", str(seed), "--out", str(out), "--no-frontier", learners=2, workers=3)
        said, _ = run.communicate()
        assert run.returncode == 0, said


if __name__ == "__main__":
    train_demo(int(sys.argv[1]), Path(sys.argv[2]))
