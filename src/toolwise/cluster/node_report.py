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
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from toolwise.cluster.interface import Cluster, ClusterError, Payload, Resources
from toolwise.concurrency.threads import core_count
from toolwise.config.cluster import ClusterConfig

PACKAGES = ("toolwise", "torch", "transformers", "numpy", "safetensors", "peft", "ray")
MUST_AGREE = ("python", "code", *PACKAGES)
"""Where nodes differ in one of these, results may differ or calls fail."""
START_S = 120.0


def node_facts(paths: Sequence[str] = ()) -> dict[str, Any]:
    """What this process has; `paths` by their contents."""
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
        "cpus": core_count(),
        "gpus": _gpus(),
        "free_disk_gib": round(shutil.disk_usage(tempfile.gettempdir()).free / 2**30, 1),
        **{path: path_hash(Path(path)) for path in paths},
    }


@cache
def code_hash() -> str:
    """Of the source of this package, as it was when the process first asked."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def path_hash(path: Path) -> str:
    """Of a file, or of all files of a folder by their names there; "missing" if there is none."""
    if not path.exists():
        return "missing"
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file()):
        digest.update(str(file.relative_to(path)).encode() + b"\0")
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
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
            paths = json.loads(bytes(payload.get("paths", b"[]")))  # type: ignore[arg-type]
            return {"facts": json.dumps(await asyncio.to_thread(node_facts, paths), allow_nan=False).encode()}
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


async def report_nodes(cluster: Cluster, nodes: Nodes, paths: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Facts of every node by its address and id; {"problem": …} for one that does not answer."""

    async def ask(node: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        name = f"{node['address']} {node['id'][:8]}"
        try:
            where = Resources(cpus=0.0, node=node["id"])
            process = await cluster.start(
                "node", f"reporter-{node['id'][:8]}", {}, where, deadline_s=START_S, stored=None
            )
            asked = {"paths": json.dumps(list(paths)).encode()}
            reply = await cluster.call(process, "report", asked, deadline_s=START_S)
            await cluster.kill(process)
            return name, json.loads(bytes(reply["facts"]))  # type: ignore[arg-type]
        except ClusterError as fault:
            return name, {"problem": str(fault)}

    return dict(await asyncio.gather(*map(ask, nodes.nodes())))


def compare_nodes(
    address: str, paths: Sequence[str] = ()
) -> tuple[dict[str, Any], dict[str, dict[str, Any]], list[str]]:
    """The facts of this process and of every node of the cluster at `address`, and in what they differ; `paths`: by
    their contents, too."""
    from toolwise.cluster.ray_cluster import RayCluster

    async def ask() -> dict[str, dict[str, Any]]:
        cluster = RayCluster(ClusterConfig(address=address))
        try:
            return await report_nodes(cluster, cluster, paths)
        finally:
            await cluster.close()

    here, reports = node_facts(paths), asyncio.run(ask())
    return here, reports, differences(here, reports, paths)


def differences(
    here: Mapping[str, Any], reports: Mapping[str, Mapping[str, Any]], paths: Sequence[str] = ()
) -> list[str]:
    """One line for each fact in which a node differs from this process, and for each node that did not answer."""
    problems = []
    for name, facts in reports.items():
        if "problem" in facts:
            problems.append(f"{name}: {facts['problem']}")
            continue
        problems += [
            f"{name}: {key} is {facts.get(key)}, here {here[key]}"
            for key in (*MUST_AGREE, *paths)
            if facts.get(key) != here[key]
        ]
    return problems
