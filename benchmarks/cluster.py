"""What a cluster costs, on this machine: a call, a group, a weight transfer by model size, and rollouts by workers.

python benchmarks/cluster.py            # all parts, on a local Ray cluster
python benchmarks/cluster.py --transfer # weights alone, without Ray

For scaling, workers do nothing but wait for half a second a group, as for a slow tool, so that the time shows the
machinery: with perfect scaling it does not depend on their number, because each gets the same number of groups.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from typing import Any

import numpy as np
import torch

from toolwise.cluster.interface import Payload, Process, Resources, payload_bytes
from toolwise.cluster.ray_cluster import RayCluster
from toolwise.cluster.weight_transfer import bits_of, difference, install, whole_copy
from toolwise.cluster.worker_pool import WorkerPool
from toolwise.config.cluster import ClusterConfig

SIZES = {"2 M": 2_000_000, "135 M": 135_000_000}
TOOL_S, GROUPS = 0.5, 12
LIMIT_S = 120.0


def measure_transfer() -> None:
    """Gather, difference, checksum and installation of weights, without the way between processes."""
    for name, count in SIZES.items():
        for dtype in (torch.float32, torch.bfloat16):
            generator = torch.Generator().manual_seed(0)
            parts = {f"w{i}": torch.randn(count // 10, generator=generator).mul_(0.02).to(dtype) for i in range(10)}
            began = time.perf_counter()
            old = bits_of(parts)
            gathered = time.perf_counter() - began
            moved = {
                n: (w.float() + 1e-6 * torch.randn(w.shape, generator=generator)).to(dtype) for n, w in parts.items()
            }
            new = bits_of(moved)
            began = time.perf_counter()
            changes = difference(new, old, 2, 1, "x")
            compared = time.perf_counter() - began
            payload = whole_copy(new, 2, "x") if changes is None else changes
            share = payload_bytes(payload) / sum(b.nbytes for b in new.values())
            began = time.perf_counter()
            install(parts, payload, 1)
            installed = time.perf_counter() - began
            print(
                f"{name:>6} {str(dtype).removeprefix('torch.'):>8}: gather {gathered:.3f} s, compare {compared:.3f} s, "
                f"{payload_bytes(payload) / 1e6:.1f} MB ({share:.1%} of the whole), install {installed:.3f} s"
            )


class WaitingCluster(RayCluster):
    """Its workers wait as long as one call of a slow tool."""

    async def start(self, role: str, *arguments: Any, **options: Any) -> Process:
        return await super().start("node", *arguments, **options)

    async def call(self, process: Process, method: str, payload: Payload, **options: Any) -> Payload:
        chosen, given = ("sleep", {"seconds": TOOL_S}) if method == "roll_out" else (method, payload)
        return await super().call(process, chosen, given, **options)


async def measure_calls(cluster: Any) -> None:
    process = await cluster.start("node", "echo", {}, Resources(0.1), deadline_s=LIMIT_S, stored=None)
    for size in (100, 100_000, 10_000_000):
        payload, times = {"data": np.zeros(size, np.uint8)}, []
        for _ in range(30):
            began = time.perf_counter()
            await cluster.call(process, "echo", payload, deadline_s=LIMIT_S)
            times.append(time.perf_counter() - began)
        print(f"a call with {size:,} bytes there and back: {1000 * sorted(times)[15]:.2f} ms")
    await cluster.kill(process)


async def measure_scaling(cluster: Any) -> None:
    """The pool over processes that wait: each worker gets `GROUPS` groups, four at a time."""
    for workers in (1, 2, 4, 8):
        pool = WorkerPool(cluster, ClusterConfig(workers=workers, worker_cpus=0.05), {}, slots=4, call_s=LIMIT_S)
        await pool.start()
        began = time.perf_counter()
        await asyncio.gather(*(pool.run({"group": group}) for group in range(workers * GROUPS)))
        seconds = time.perf_counter() - began
        ideal = GROUPS / 4 * TOOL_S
        print(f"{workers} workers, {workers * GROUPS} groups: {seconds:.2f} s, {ideal / seconds:.0%} of linear")
        await pool.close()


async def measure_ray() -> None:
    cluster = WaitingCluster(ClusterConfig(address="local", workers=8, worker_cpus=0.1, object_store_mb=200))
    try:
        await measure_calls(cluster)
        await measure_scaling(cluster)
    finally:
        await cluster.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transfer", action="store_true", help="weights alone, without Ray")
    chosen = parser.parse_args()
    print(f"load average: {os.getloadavg()}")
    torch.set_num_threads(1)
    measure_transfer()
    if not chosen.transfer:
        asyncio.run(measure_ray())


if __name__ == "__main__":
    main()
