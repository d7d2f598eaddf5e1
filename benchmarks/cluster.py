"""What a cluster costs, on this machine: a call, a group, a weight transfer by model size, and rollouts by workers.

python benchmarks/cluster.py            # all parts, on a local Ray cluster
python benchmarks/cluster.py --transfer 1.6B  # weights alone, without Ray
python benchmarks/cluster.py --workers  # real rollout workers alone
python benchmarks/cluster.py --device cuda --shapes 135m 1.6b  # learner and engine as two processes, without Ray

For scaling, each worker gets the same number of groups, so that with perfect scaling the time does not depend on their
number. First with processes that do nothing but wait for half a second a group, which shows the pool; then with real
workers, whose episodes wait half a second for their environment and sample one token.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from toolwise.cluster.interface import Payload, Process, Resources, payload_bytes
from toolwise.cluster.ray_cluster import RayCluster
from toolwise.cluster.session import running_on
from toolwise.cluster.weight_transfer import SentWeights, install
from toolwise.cluster.worker_pool import WorkerPool
from toolwise.config.cluster import ClusterConfig
from toolwise.config.schema import RunConfig
from toolwise.envs.base import BaseEnv
from toolwise.training.run import assemble
from toolwise.types import Task

SIZES = {"2M": 2_000_000, "135M": 135_000_000, "1.6B": 1_600_000_000}
MAX_FLOAT32 = 500_000_000
"""Of weights in float32: more do not fit into 24 GiB three times over."""
TOOL_S, GROUPS = 0.5, 12
VERSIONS = 3
"""The last one is shown: memory is used for the first time before."""
LIMIT_S = 120.0


def measure_transfer(sizes: Sequence[str]) -> None:
    """Gather, difference, checksum and installation of weights, without the way between processes, with a thread for
    each core."""
    for name in sizes:
        count = SIZES[name]
        for dtype in (torch.float32, torch.bfloat16) if count <= MAX_FLOAT32 else (torch.bfloat16,):
            generator = torch.Generator().manual_seed(0)
            parts = {f"w{i}": torch.randn(count // 20, generator=generator).mul_(0.02).to(dtype) for i in range(20)}
            target = {n: w.clone() for n, w in parts.items()}
            sent = SentWeights()
            sent.take(parts, 0, "x")
            for version in range(1, 1 + VERSIONS):
                for w in parts.values():  # in place, as an optimizer does
                    w.copy_(torch.randn(w.shape, generator=generator).mul_(1e-6).add_(w))
                began = time.perf_counter()
                changes = sent.take(parts, version, "x")
                gathered = time.perf_counter()
                payload = sent.whole() if changes is None else changes
                sealed = time.perf_counter()
                install(target, payload, version - 1)
                installed = time.perf_counter()
            share = payload_bytes(payload) / sum(b.nbytes for b in sent.bits.values())
            print(
                f"{name:>6} {str(dtype).removeprefix('torch.'):>8}: gather {gathered - began:.3f} s, "
                f"seal {sealed - gathered:.3f} s, "
                f"{payload_bytes(payload) / 1e6:.1f} MB ({share:.1%} of the whole), install {installed - sealed:.3f} s"
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


class SlowWorld(BaseEnv):
    """An environment that takes `seconds` to begin an episode; the only reply of one token then ends it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def reset(self) -> str:
        await asyncio.sleep(self.seconds)
        return ""

    async def step(self, action: Any) -> tuple[str, float | None, bool, dict[str, Any]]:
        return "", 0.0, True, {}


def no_reward(messages: Any, ground_truth: Any) -> float:
    return 0.0


async def measure_workers() -> None:
    """Real rollout workers, each with its engine: `GROUPS` groups of two episodes for each, four at a time."""
    tasks = [Task(task_id=str(index), prompt=[{"role": "user", "content": f"Go {index}."}]) for index in range(8)]
    for workers in (1, 2, 4, 8):
        cluster_settings = {"address": "local", "workers": workers, "worker_cpus": 0.1, "groups_per_worker": 4}
        config = RunConfig.model_validate(
            {
                "cluster": cluster_settings,
                "model": {"device": "cpu", "threads": 1},
                "data": {"batch_size": len(tasks)},
                "env": {"name": f"{__file__}:SlowWorld", "kwargs": {"seconds": TOOL_S}},
                "rollout": {"n": 2, "max_new_tokens": 1, "temperature": 2.0},
                "reward": {"function": f"{__file__}:no_reward", "sandbox": {"tier": "off"}},
                "trainer": {"console": False},
            }
        )
        print(f"{workers} real workers: starting", flush=True)
        began = time.perf_counter()
        run, cluster = assemble(config, tasks=tasks, validation_tasks=[]), RayCluster(config.cluster)
        try:
            with TemporaryDirectory() as folder:
                async with running_on(cluster, run, config, Path(folder)) as placed:
                    started = time.perf_counter() - began
                    for label, groups in (("warm", workers), ("timed", workers * GROUPS)):
                        chosen = [tasks[index % len(tasks)] for index in range(groups)]
                        decisions = placed.router.decide(chosen, 2, 0, label=label)
                        began = time.perf_counter()
                        async for _ in placed.scheduler.groups(decisions):
                            pass
                        seconds = time.perf_counter() - began
        finally:
            await cluster.close()
            run.close()
        ideal_s = GROUPS / 4 * TOOL_S
        print(
            f"{workers} real workers, waiting {TOOL_S:g} s: ready in {started:.1f} s, "
            f"{workers * GROUPS} groups in {seconds:.2f} s, "
            f"{workers * GROUPS / seconds:.2f} a second, {ideal_s / seconds:.0%} of linear",
            flush=True,
        )


async def measure_ray() -> None:
    cluster = WaitingCluster(ClusterConfig(address="local", workers=8, worker_cpus=0.1, object_store_mb=200))
    try:
        await measure_calls(cluster)
        await measure_scaling(cluster)
    finally:
        await cluster.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transfer", nargs="*", choices=SIZES, metavar="SIZE", help="weights alone, without Ray")
    parser.add_argument("--workers", action="store_true", help="real rollout workers alone")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="learner and engine as two processes, without Ray")
    parser.add_argument("--shapes", nargs="*", default=["135m", "1.6b"], help="with --device: of shapes.py")
    chosen = parser.parse_args()
    print(f"load average: {os.getloadavg()}", flush=True)
    if chosen.device is not None:
        from two_processes import measure_two_processes

        measure_two_processes(chosen.device, chosen.shapes)
        return
    torch.set_num_threads(1)
    if not chosen.workers:
        measure_transfer(chosen.transfer or ("2M", "135M"))
    if chosen.transfer is None and not chosen.workers:
        asyncio.run(measure_ray())
    if chosen.transfer is None:
        asyncio.run(measure_workers())


if __name__ == "__main__":
    main()
