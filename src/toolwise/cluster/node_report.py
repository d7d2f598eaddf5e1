"""Versions, code and resources of each node, and how they differ from those here: `toolwise doctor --cluster`."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from toolwise.cluster.interface import Cluster, ClusterError, Payload, Resources
from toolwise.config.cluster import ClusterConfig

PACKAGES = ("toolwise", "torch", "transformers", "numpy", "safetensors", "peft", "ray")
MUST_AGREE = ("python", "code", *PACKAGES)
"""Where nodes differ in one of these, results may differ or calls fail."""
START_S = 120.0


def node_facts() -> dict[str, Any]:
    """What this process has."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "missing"
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        **versions,
        "code": code_hash(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpus": _gpus(),
        "free_disk_gib": round(shutil.disk_usage(tempfile.gettempdir()).free / 2**30, 1),
    }


@cache
def code_hash() -> str:
    """Of the source of this package, as it was when the process first asked."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _gpus() -> int:
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count()


class NodeReporter:
    """The role of a process that only reports."""

    def __init__(self, name: str, payload: Payload) -> None:
        self.name = name

    async def handle(self, method: str, payload: Payload) -> Payload:
        if method == "report":
            return {"facts": json.dumps(node_facts(), allow_nan=False).encode()}
        if method == "echo":  # this and the next two: to measure and to test calls
            return payload
        if method == "sleep":
            await asyncio.sleep(float(payload["seconds"]))
            return {}
        if method == "pid":
            return {"pid": os.getpid()}
        raise ClusterError(f"a reporter has no {method}")

    def close(self) -> None:
        return


class Nodes(Protocol):
    def nodes(self) -> list[dict[str, Any]]: ...


async def report_nodes(cluster: Cluster, nodes: Nodes) -> dict[str, dict[str, Any]]:
    """Facts of every node by its address and id; {"problem": …} for one that does not answer."""

    async def ask(node: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        name = f"{node['address']} {node['id'][:8]}"
        try:
            where = Resources(cpus=0.0, node=node["id"])
            process = await cluster.start(
                "node", f"reporter-{node['id'][:8]}", {}, where, deadline_s=START_S, stored=None
            )
            reply = await cluster.call(process, "report", {}, deadline_s=START_S)
            await cluster.kill(process)
            return name, json.loads(bytes(reply["facts"]))  # type: ignore[arg-type]
        except ClusterError as fault:
            return name, {"problem": str(fault)}

    return dict(await asyncio.gather(*map(ask, nodes.nodes())))


def compare_nodes(address: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]], list[str]]:
    """The facts of this process and of every node of the cluster at `address`, and in what they differ."""
    from toolwise.cluster.ray_cluster import RayCluster

    async def ask() -> dict[str, dict[str, Any]]:
        cluster = RayCluster(ClusterConfig(address=address))
        try:
            return await report_nodes(cluster, cluster)
        finally:
            await cluster.close()

    here, reports = node_facts(), asyncio.run(ask())
    return here, reports, differences(here, reports)


def differences(here: Mapping[str, Any], reports: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One line for each fact in which a node differs from this process, and for each node that did not answer."""
    problems = []
    for name, facts in reports.items():
        if "problem" in facts:
            problems.append(f"{name}: {facts['problem']}")
            continue
        problems += [
            f"{name}: {key} is {facts.get(key)}, here {here[key]}" for key in MUST_AGREE if facts.get(key) != here[key]
        ]
    return problems
