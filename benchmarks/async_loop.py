"""Synchronous against asynchronous training in a world of slow tools: `python benchmarks/async_loop.py`.

The model that ships plays episodes of three turns. Each turn calls a tool whose time is log-normal, 0.2 s in the median
and 5 s or more in one call of a hundred. All modes train as many steps from the same weights on the same tasks, with
the same tool times, one after the other, after a synchronous step that is not counted. The time includes the first
episodes, for which the learner waits in any mode. Both sides share the machine's cores, so run it on an idle one: the
load average is printed beside the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import time
from collections import Counter
from typing import Any, ClassVar

from toolwise.config.schema import RunConfig
from toolwise.envs.base import BaseEnv
from toolwise.messages import Message
from toolwise.training.async_loop import AsyncLoop
from toolwise.training.loop import train_step
from toolwise.training.run import Run, assemble
from toolwise.types import Task

MEDIAN_S, TAIL_S, TAIL_SHARE_Z, TURNS = 0.2, 5.0, 2.326, 3
"""One in a hundred lies above 2.326 standard deviations."""
SIGMA = math.log(TAIL_S / MEDIAN_S) / TAIL_SHARE_Z


class SlowWorld(BaseEnv):
    """Answers each turn after the time its tool takes; the reward is how many different words the agent used."""

    episodes: ClassVar[Counter[int]] = Counter()

    def set_seed(self, seed: int) -> None:
        self.episodes[seed] += 1
        self.chance, self.turn = random.Random(f"{seed}/{self.episodes[seed]}"), 0

    async def reset(self) -> str:
        return "Begin."

    async def step(self, action: Any) -> tuple[str, float | None, bool, dict[str, Any]]:
        await asyncio.sleep(self.chance.lognormvariate(math.log(MEDIAN_S), SIGMA))
        self.turn += 1
        return "Go on.", float(len(set(str(action).split()))), self.turn == TURNS, {}


def build(mode: dict[str, Any], args: argparse.Namespace) -> Run:
    config = RunConfig.model_validate(
        {
            "model": {"device": "cpu"},
            "data": {"batch_size": args.batch},
            "rollout": {"n": args.n, "max_new_tokens": args.tokens},
            "reward": {"function": "env"},
            "actor": {"lr": 1e-4},
            "algorithm": {"zero_std_groups": "keep"},
            "multi_turn": {"max_turns": TURNS},
            "trainer": {"total_steps": args.steps, **mode},
        }
    )
    tasks = [Task(task_id=str(i), prompt=[Message(role="user", content=f"Question {i}?")]) for i in range(64)]
    return assemble(config, tasks=tasks, validation_tasks=[], env=SlowWorld)


async def measure(run: Run, steps: int) -> tuple[float, list[dict[str, float]]]:
    """Seconds of all steps, and their metrics."""
    loop = None if run.tickets is None else AsyncLoop(run)
    step = train_step if loop is None else loop.train_step
    try:
        started = time.perf_counter()
        found = [dict((await step(run)).metrics) for _ in range(steps)]
        return time.perf_counter() - started, found
    finally:
        if loop is not None:
            await loop.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--staleness", type=int, nargs="*", default=[1, 2, 4])
    args = parser.parse_args()
    print(f"{args.steps} steps of {args.batch} x {args.n} episodes, load average {os.getloadavg()[0]:.1f}")
    print("mode            s/step   speed-up   learner waits   engine waits   staleness (mean, worst)   ess")
    baseline = 0.0
    modes = [{"mode": "sync"}, *({"mode": "async", "max_staleness": bound} for bound in args.staleness)]
    warm_up = build({"mode": "sync"}, args)
    asyncio.run(measure(warm_up, 1))
    warm_up.close()
    for mode in modes:
        SlowWorld.episodes.clear()
        run = build(mode, args)
        try:
            seconds, steps = asyncio.run(measure(run, args.steps))
        finally:
            run.close()
        per_step = seconds / args.steps
        baseline = baseline or per_step

        def mean(name: str, steps: list[dict[str, float]] = steps) -> float:
            values = [metrics[name] for metrics in steps if name in metrics]
            return sum(values) / len(values) if values else float("nan")

        bound = mode.get("max_staleness")
        name = "sync" if bound is None else f"async, {bound}"
        ages = f"{mean('staleness/mean'):.2f}, {max(metrics.get('staleness/max', 0.0) for metrics in steps):.0f}"
        waits = f"{mean('async/learner_wait'):13.0%} {mean('async/engine_wait'):14.0%}"
        ess = mean("staleness/ess")
        print(f"{name:12} {per_step:9.2f} {baseline / per_step:10.2f} {waits} {ages:>25} {ess:7.3f}", flush=True)


if __name__ == "__main__":
    main()
