"""The router experiment of docs/results.md: does the budget hold, and how close does the router come to the oracle?

    python scripts/router_experiment.py --out runs/router --budgets 0.2,0.4,0.6 --seeds 5 --jobs 16

Five stages, each stored in OUT and not repeated:

    actor    the model that ships, trained by SFT to obey its route (scripts/router_actor.py)
    pool     real rollouts of every (task, route), for training and held-out tasks
    prompts  what the head sees of each task: the frozen trunk reads every prompt once, for all runs
    runs     the router of `[router]`, labels off, the actor frozen, one process per run. A step samples its rollouts
             from the training pool, with replacement, since a frozen actor's rollouts of a (task, route) are
             identically distributed. --real B makes one run of that budget with live rollouts, as a check
    report   on the held-out pool: expected cost and score of the trained policy with sampled routes, averaged over all
             rollouts of each row; OUT/report.md and OUT/report.json. What is delivered, under the calibrated
             thresholds, is measured on the fresh tasks by scripts/budget_holds.py --router OUT

Fixed before the seeds were run: 6,400 training tasks, 4,000 of them set aside for calibration; tools cost 1 per call;
hard routes, not mentioned in the prompt (the schemas show them); the same settings for all budgets, controls included,
tuned on seed 100 only (`--seed-offset 100`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", TOKENIZERS_PARALLELISM="false")
sys.path.insert(0, str(Path(__file__).parent))

ROLLOUTS = 6
ROUTER: dict[str, Any] = {
    "enable": True,
    "train_actor": False,
    "wording": "silent",
    "usage": "executed",
    "calibration": 0.625,
}
"""Everything else is at the defaults of `[router]`."""


@dataclass(frozen=True)
class Scale:
    """The size of the experiment."""

    tasks: dict[str, int]
    """Per split; `fresh` ones are routed, not rolled out."""
    draws: dict[str, int]
    """Rollouts per (task, route) of each split that has a pool."""
    batch: int
    """Prompts per step; a run with live rollouts has a quarter of them and two fifths of the steps."""


FULL = Scale({"train": 6400, "heldout": 1200, "fresh": 12_000}, {"train": 2, "heldout": 4}, 256)
SMALL = Scale({"train": 300, "heldout": 150, "fresh": 200}, {"train": 4, "heldout": 6}, 96)


@dataclass(frozen=True)
class Job:
    """One run."""

    name: str
    budget: float
    seed: int
    router: dict[str, Any] = field(default_factory=dict)
    dual: dict[str, Any] = field(default_factory=dict)
    prices: dict[str, float] = field(default_factory=lambda: {"calculator": 1.0, "search": 1.0})
    real: bool = False
    exactly: bool = True
    """Deterministic to the bit; slower with live rollouts."""


def jobs_of(budgets: Sequence[float], seeds: Sequence[int], real: float | None) -> list[Job]:
    """The runs, and the controls: what must fail, and what must change."""
    middle = budgets[len(budgets) // 2]
    made = [Job(f"budget-{b:g}-{s}", b, s) for s in seeds for b in budgets]
    made += [Job(f"value-{middle:g}-{s}", middle, s, {"mode": "value", "temperature": 0.05}) for s in seeds[:1]]
    for s in seeds[:3]:
        made += [
            Job(f"lambda-0-{s}", middle, s, dual={"rate": 0.0, "proportional": 0.0}),
            Job(f"dear-search-{s}", middle, s, prices={"calculator": 1.0, "search": 2.0}),
        ]
    # At a fixed λ, where only cost differs: centred advantages respond to λ, those divided by their std do not.
    for price in (0.001, 0.1):
        fixed = {"rate": 0.0, "proportional": 0.0, "initial": price}
        made += [
            Job(f"fixed-{price:g}-centred-{seeds[0]}", middle, seeds[0], dual=fixed),
            Job(f"fixed-{price:g}-std-{seeds[0]}", middle, seeds[0], {"divide_by_std": True}, fixed),
        ]
    made += [] if real is None else [Job(f"real-{real:g}", real, seeds[0], real=True, exactly=False)]
    return made


def settings_of(job: Job, out: Path, scale: Scale, steps: int) -> dict[str, Any]:
    return {
        "name": job.name,
        "seed": job.seed,
        "deterministic": job.exactly,
        "model": {"path": str(out / "actor"), "device": "cpu"},
        "data": {
            "train": str(out / "tasks" / "train.jsonl"),
            "batch_size": scale.batch // 4 if job.real else scale.batch,
        },
        "tools": [{"name": name, "price": price} for name, price in job.prices.items()],
        "rollout": {"n": ROLLOUTS, "max_new_tokens": 48},
        "multi_turn": {"max_turns": 6},
        "reward": {
            "function": "toolwise.demo.reward:small_world_reward",
            "kwargs": {"price_per_call": 0.0},
            "sandbox": {"tier": "off"},
        },
        "router": {**ROUTER, **job.router, "budgets": [{"limit": job.budget, **job.dual}]},
        "trainer": {"total_steps": steps, "console": False},
    }


def config_of(job: Job, out: Path, scale: Scale, steps: int = 1) -> Any:
    from toolwise.config.loader import build_config
    from toolwise.config.schema import RunConfig

    return build_config(RunConfig, settings_of(job, out, scale, steps), source=job.name)


# The pool.


def write_tasks(out: Path, scale: Scale) -> None:
    from toolwise.demo.tasks import write_rows

    for split, count in scale.tasks.items():
        path = out / "tasks" / f"{split}.jsonl"
        if not path.exists():
            rows, seed = ("heldout", 12) if split == "fresh" else (split, 11)
            write_rows(path, count, seed=seed, split=rows)


def fill(out: Path, scale: Scale, split: str, shard: int, shards: int) -> None:
    """Fill one process's shard of a pool."""
    _one_thread()
    from toolwise.data import load_tasks
    from toolwise.frontier.rollout_pool import PoolPlan, fill_pool
    from toolwise.routing.conditioning import Conditioning
    from toolwise.routing.families import ROUTES, RouteAction
    from toolwise.tools.catalog import build_tools
    from toolwise.training.evaluate import build_scoring
    from toolwise.training.rollout_setup import build_scheduler, local_policy
    from toolwise.types import RouteDecision, Task

    config = config_of(Job("pool", 1.0, 0, exactly=False), out, scale)
    tools = build_tools(list(config.tools))
    conditioning = Conditioning(config.router, tools)

    def begin(route: RouteAction) -> Callable[[Task], RouteDecision]:
        def decide(task: Task) -> RouteDecision:
            return conditioning.decision(task, route, group_id=f"{task.task_id}/{route}", n=1, seed=0, prompt_id="")

        return decide

    tasks = load_tasks(out / "tasks" / f"{split}.jsonl")[shard::shards]
    plan = PoolPlan(tasks, {route.value: begin(route) for route in ROUTES}, scale.draws[split], "correct", seed=3)
    scheduler = build_scheduler(config, local_policy(config, config.model.path), tools)
    scoring = build_scoring(config.reward)
    path = out / "pool" / f"{split}-{shard}-of-{shards}.jsonl"
    asyncio.run(fill_pool(plan, path, scheduler, scoring, lambda rollout: rollout.usage.cost))
    scoring.close()


Pool = dict[tuple[str, str], list[dict[str, Any]]]
"""(task id, route) -> sampled rollouts: score, calls"""


def read_pool(out: Path, split: str) -> Pool:
    pool: Pool = {}
    for path in sorted((out / "pool").glob(f"{split}-*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines()[1:]:
            cell = json.loads(line)
            pool[cell["task_id"], cell["route"]] = cell["draws"]
    return pool


# One run.


def train(job: Job, out: Path, scale: Scale, steps: int) -> None:
    """Write one line per step, and a last one with the trained policy's route probabilities: as sampled on the held-out
    tasks, as delivered on the fresh ones."""
    _one_thread()
    path = out / "runs" / f"{job.name}.jsonl"
    began, lines = time.perf_counter(), []
    steps = steps * 2 // 5 if job.real else steps
    run, tasks = _assembled(job, out, scale, steps)
    source = _real(run) if job.real else _simulated(run, job, read_pool(out, "train"))
    for step, metrics in enumerate(source):
        kept = {name: value for name, value in metrics.items() if name.startswith("router/")}
        lines.append({"step": step, **kept})
        if step + 1 == steps:
            break
    weighed, fresh = (
        run.router.model.predict(list(map(run.router.prompt_of, tasks[split])), run.router.multipliers, averaged=True)
        for split in ("heldout", "fresh")
    )
    calibration = _calibrate(run, read_pool(out, "train"))
    lines.append(
        {
            "done": True,
            "seconds": time.perf_counter() - began,
            "lambda": run.router.multipliers,
            "probs": [w.probs for w in weighed],
            "delivered": _delivered(calibration, fresh),
            "calibration": calibration.to_json(),
            "foreseen": [[w.rewards, w.costs] for w in weighed] if weighed[0].rewards is not None else None,
        }
    )
    run.close()
    partial = path.with_suffix(".tmp")
    partial.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    partial.rename(path)


def _calibrate(run: Any, pool: Pool) -> Any:
    """The thresholds for the run's budget, on the tasks it set aside; their rollouts come from the pool."""
    import numpy as np
    from router_report import ALLOWED

    from toolwise.routing.calibration import CalibrationTable, calibrate_budgets, values_and_costs

    tasks = run.calibration.calibration
    values, costs = zip(*map(values_and_costs, run.router.predict_delivered(tasks)), strict=True)
    prices = {name: tool.price for name, tool in run.scheduler.tools.items()}
    paid, scores = [], []
    for task in tasks:
        cells = [(pool[task.task_id, route], allowed) for route, allowed in ALLOWED.items()]
        paid.append(
            [np.mean([sum(prices[t] * d["calls"].get(t, 0) for t in tools) for d in ds]) for ds, tools in cells]
        )
        scores.append([np.mean([draw["score"] for draw in draws]) for draws, _ in cells])
    predicted = None if costs[0] is None else np.stack(costs)
    table = CalibrationTable(
        np.stack(values), predicted, np.arange(len(tasks)), np.array(paid)[:, :, None], np.array(scores)
    )
    return calibrate_budgets(table, run.router.budgets.limits)


def _delivered(calibration: Any, predictions: Sequence[Any]) -> list[list[float]]:
    """The probability of each route of each task under the thresholds."""
    import numpy as np

    from toolwise.routing.calibration import values_and_costs

    values, costs = zip(*map(values_and_costs, predictions), strict=True)
    expected = np.broadcast_to(np.asarray(calibration.route_costs), (len(values), *np.shape(calibration.route_costs)))
    return calibration.threshold.probabilities(
        np.stack(values), expected if costs[0] is None else np.stack(costs)
    ).tolist()


def _assembled(job: Job, out: Path, scale: Scale, steps: int) -> tuple[Any, dict[str, list[Any]]]:
    """The run and the tasks that it never sees; features of prompts come from OUT, tokens are rendered only once."""
    import torch

    from toolwise.data import load_tasks
    from toolwise.training.run import assemble

    run: Any = assemble(config_of(job, out, scale, steps))
    unseen = {split: load_tasks(out / "tasks" / f"{split}.jsonl") for split in ("heldout", "fresh")}
    stored = torch.load(out / "features.pt", weights_only=True)
    rendered = dict(zip(stored["texts"], stored["prompts"], strict=True))
    known = dict(zip(map(tuple, stored["prompts"]), stored["features"], strict=True))
    run.router.prompt_of = lambda task: rendered[task.prompt[-1].content]
    run.router.model.encode = lambda given: torch.stack([known[tuple(prompt)] for prompt in given])
    return run, unseen


def encode(out: Path, scale: Scale) -> None:
    """Write OUT/features.pt: the prompt of every task and what the frozen trunk makes of it."""
    _one_thread()
    import torch

    from toolwise.data import load_tasks
    from toolwise.routing.head.predictor import prompt_features
    from toolwise.training.run import assemble

    run: Any = assemble(config_of(Job("features", 1.0, 0), out, scale))
    tasks = [task for split in scale.tasks for task in load_tasks(out / "tasks" / f"{split}.jsonl")]
    prompts = [list(run.router.prompt_of(task)) for task in tasks]
    with torch.no_grad():
        parts = [prompt_features(run.learner.model, prompts[i : i + 512]) for i in range(0, len(prompts), 512)]
    partial = out / "features.tmp"
    torch.save(
        {"texts": [t.prompt[-1].content for t in tasks], "prompts": prompts, "features": torch.cat(parts)}, partial
    )
    partial.rename(out / "features.pt")
    run.close()


def _real(run: Any) -> Iterator[dict[str, float]]:
    from toolwise.training.loop import train_step

    while True:
        yield asyncio.run(train_step(run)).metrics


def _simulated(run: Any, job: Job, pool: Pool) -> Iterator[dict[str, float]]:
    """The router itself decides, credits and learns; only the rollouts come from the pool."""
    step = 0
    while True:
        decisions = run.router.decide(next(run.batches), ROLLOUTS, step)
        yield run.router.learn([s for d in decisions for s in drawn(d, pool, Random(f"{job.seed}/{d.group_id}"))])
        step += 1


def drawn(decision: Any, pool: Pool, rng: Random) -> list[Any]:
    from toolwise.types import EvaluateResult, Rollout, ScoredRollout, StopReason, Usage

    found = rng.choices(pool[decision.task.task_id, decision.route], k=decision.n)
    return [
        ScoredRollout(
            Rollout(
                f"{decision.group_id}#{offset}",
                decision.group_id,
                0,
                offset,
                decision.task,
                decision.route,
                (),
                decision.prompt,
                StopReason.ANSWERED,
                Usage(calls=draw["calls"]),
            ),
            EvaluateResult(score=draw["score"]),
            (),
        )
        for offset, draw in enumerate(found)
    ]


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


# All of it.


def in_parallel(count: int, work: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> None:
    """Run each in a fresh process: torch is not fork-safe."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(count, max(1, len(arguments))), maxtasksperchild=1) as pool:
        for waiting in [pool.apply_async(work, one) for one in arguments]:
            waiting.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the experiment")
    parser.add_argument("--budgets", type=lambda text: [float(b) for b in text.split(",")], default=[0.2, 0.4, 0.6])
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--seed-offset", type=int, default=0, help="first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="concurrent processes")
    parser.add_argument("--steps", type=int, default=300, help="training steps per run")
    parser.add_argument("--real", type=float, help="add a run of this budget with live rollouts")
    parser.add_argument("--only", default="", help="only runs whose name starts with this")
    parser.add_argument("--small", action="store_true", help="few tasks and rollouts, as a smoke test")
    args = parser.parse_args()
    out, scale = args.out, SMALL if args.small else FULL
    for folder in ("tasks", "pool", "runs"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    if not (out / "actor").exists():
        from router_actor import teach

        teach(out / "actor")
    write_tasks(out, scale)
    began = time.perf_counter()
    if not (out / "pool" / "done").exists():
        in_parallel(
            args.jobs, fill, [(out, scale, split, i, args.jobs) for split in scale.draws for i in range(args.jobs)]
        )
        (out / "pool" / "done").touch()
    print(f"pool after {time.perf_counter() - began:.0f} s", flush=True)
    if not (out / "features.pt").exists():
        in_parallel(1, encode, [(out, scale)])
    print(f"prompts after {time.perf_counter() - began:.0f} s", flush=True)
    seeds = [args.seed_offset + seed for seed in range(args.seeds)]
    jobs = [job for job in jobs_of(args.budgets, seeds, args.real) if job.name.startswith(args.only)]
    wanted = [job for job in jobs if not (out / "runs" / f"{job.name}.jsonl").exists()]
    # The run with live rollouts takes longest, so it starts first.
    wanted.sort(key=lambda job: not job.real)
    in_parallel(args.jobs, train, [(job, out, scale, args.steps) for job in wanted])
    print(f"runs after {time.perf_counter() - began:.0f} s, load {os.getloadavg()[0]:.1f}", flush=True)
    from router_report import report

    report(out, jobs, config_of(jobs[0], out, scale))


if __name__ == "__main__":
    main()
