"""What routing adds to an answer, and its share of a training step: `python benchmarks/routing.py`.

    python benchmarks/routing.py                   a short run of the demo in a temporary folder, then both parts
    python benchmarks/routing.py --run runs/demo   a finished run

answer     The same fresh questions, one at a time, by two agents in alternation: one routes each question, the other is
           given the route that the first one chooses. Each has an engine and a prefix cache and sees a question once,
           so that neither profits from the other's work. The difference of each pair is what routing added.
training   `time/router_s` over `time/step_s` in the run's own metrics: predictions, decisions, credit and update of the
           router, without the first steps.

Exits with status 1 if the median of either is above its limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

LIMIT_MS, LIMIT_SHARE = 2.0, 0.03
WARM_UP_STEPS, WARM_UP_QUESTIONS = 3, 12


def make_run(folder: Path, steps: int) -> Path:
    settings = (f"trainer.total_steps={steps}", "validation.every=0", "router.calibration_rollouts=64")
    options = [option for setting in settings for option in ("--set", setting)]
    command = [sys.executable, "-m", "toolwise", "demo", "--no-frontier", "--seed", "100", "--out", str(folder)]
    subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL)
    return folder


def questions(folder: Path, count: int) -> list[Any]:
    """Fresh questions of the demo's kinds."""
    from toolwise.data import load_tasks
    from toolwise.demo.recipe import ROUTABLE_KINDS
    from toolwise.demo.tasks import write_rows

    return load_tasks(write_rows(folder / "fresh.jsonl", count, seed=20_000, split="heldout", kinds=ROUTABLE_KINDS))


async def answer_times(run: Path, tasks: Sequence[Any]) -> list[dict[str, Any]]:
    """Milliseconds of each question, routed and with the same route given, by the wall clock and in CPU time."""
    from toolwise import RoutedAgent

    routing, fixed = RoutedAgent.load(run), RoutedAgent.load(run)

    async def given(task: Any, route: str) -> Any:
        (request,) = fixed.scheduler.requests([fixed.routing.decide(task, route)], do_sample=False)
        await request.run()
        return request.to_rollout()

    async def timed(coroutine: Any) -> tuple[Any, float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        result = await coroutine
        return result, 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)

    # The other agent must know the route beforehand to go first on every second question.
    predictions = routing.routing.predict(tasks)
    routes = [routing.routing.choose(p, task, budget=None, seed=0) for p, task in zip(predictions, tasks, strict=True)]
    rows = []
    for index, (task, route) in enumerate(zip(tasks, routes, strict=True)):
        if index % 2:
            rollout, fixed_ms, fixed_cpu = await timed(given(task, route))
            answer, routed_ms, routed_cpu = await timed(routing.answer(task))
        else:
            answer, routed_ms, routed_cpu = await timed(routing.answer(task))
            rollout, fixed_ms, fixed_cpu = await timed(given(task, route))
        if answer.route != route or [m.content for m in answer.rollout.messages] != [
            m.content for m in rollout.messages
        ]:
            raise SystemExit(f"{task.task_id}: the two agents gave different answers")
        rows.append(
            {"route": route, "routed": routed_ms, "fixed": fixed_ms, "routed_cpu": routed_cpu, "fixed_cpu": fixed_cpu}
        )
    return rows[WARM_UP_QUESTIONS:]


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median and quartiles."""
    low, _, high = quantiles(values, n=4)
    return median(values), low, high


def print_answers(rows: Sequence[dict[str, Any]]) -> float:
    """Print the table; return the median of what routing added, in milliseconds."""
    print(
        "| answers | questions | routed, ms | fixed route, ms | added by routing, ms (quartiles) | added CPU time, ms |"
    )
    print("|---|---|---|---|---|---|")
    added = 0.0
    for route in (*sorted({row["route"] for row in rows}), None):
        part = [row for row in rows if route in (None, row["route"])]
        if len(part) < 2:
            continue
        added, low, high = spread([row["routed"] - row["fixed"] for row in part])
        cpu, cpu_low, cpu_high = spread([row["routed_cpu"] - row["fixed_cpu"] for row in part])
        print(
            f"| {route or 'all'} | {len(part)} | {median(row['routed'] for row in part):.1f} "
            f"| {median(row['fixed'] for row in part):.1f} | {added:.2f} ({low:.2f} to {high:.2f}) "
            f"| {cpu:.2f} ({cpu_low:.2f} to {cpu_high:.2f}) |"
        )
    return added


def print_training(run: Path) -> float:
    """Print the table; return the median share of a step that the router takes."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [row for row in map(json.loads, lines) if "time/router_s" in row][WARM_UP_STEPS:]
    if len(steps) < 2:
        raise SystemExit(f"{run}/metrics.jsonl has no time/router_s of at least {WARM_UP_STEPS + 2} steps")
    share, low, high = spread([row["time/router_s"] / row["time/step_s"] for row in steps])
    print("\n| training | steps | step, ms | router, ms | share of the step (quartiles) |\n|---|---|---|---|---|")
    print(
        f"| demo | {len(steps)} | {1e3 * median(row['time/step_s'] for row in steps):.0f} "
        f"| {1e3 * median(row['time/router_s'] for row in steps):.1f} | {share:.1%} ({low:.1%} to {high:.1%}) |"
    )
    return share


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a run of the demo; by default a short one is made")
    parser.add_argument("--steps", type=int, default=20, help="steps of the short run")
    parser.add_argument("--questions", type=int, default=240, help="questions to answer, after the warm-up")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        run = args.run or make_run(folder / "run", args.steps)
        rows = asyncio.run(answer_times(run, questions(folder, args.questions + WARM_UP_QUESTIONS)))
        added = print_answers(rows)
        share = print_training(run)
    print(f"\nload average {os.getloadavg()[0]:.1f}; limits: {LIMIT_MS:g} ms and {LIMIT_SHARE:.0%}, of the medians")
    return int(added > LIMIT_MS or share > LIMIT_SHARE)


if __name__ == "__main__":
    sys.exit(main())
