"""What staleness costs at equal rollouts: trains one small run with the asynchronous loop, on one thread.

    python scripts/async_quality.py --world grid --staleness 2 --loss tis --seed 3 --out runs/async/grid-2-tis-3.jsonl
    python scripts/async_quality.py --commands runs/async                      # all of them, one per line
    python scripts/async_quality.py --commands runs/async_tuning --tuning      # the other corrections, on tuning seeds
    python scripts/async_quality.py --report runs/async --picture docs/images/async_quality.png > section.md

`deterministic = true` fixes the schedule: every batch is sampled from the weights of exactly `--staleness` versions
before the update that learns from it, so that results do not depend on the machine's speed. Settings and rules were
fixed on seeds from 100 on, before any run with another seed; they are in docs/results.md. A run writes one line per
step, and a last one with `"done": true`; a finished run with the same settings is not repeated.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from grid_agent import ROOT, TURNS, WORLD, Chances, OneWord, episodes, fresh_model, taught_walks
from grid_world import make_rows as grid_rows

SEEDS, TUNING_SEEDS = range(5), (100, 101, 102)
STALENESS = (2, 8)
LOSSES = ("none", "tis", "decoupled", "ppo", "dppo")
"""The last one is the best of the other corrections on tuning seeds: `--commands FOLDER --tuning`."""
STEPS = {"grid": 60, "demo": 30}
RATES = {("grid", "grpo"): 5e-4, ("grid", "gigpo"): 1e-3, ("demo", "grpo"): 2e-4}
GRID_BATCH, GRID_N, DEMO_BATCH, DEMO_N = 4, 8, 4, 8
HELD_OUT, EVALUATE_EVERY = 48, 2
OMEGA = 0.2


@dataclass(frozen=True)
class Job:
    """One run."""

    world: str
    staleness: int
    loss: str
    seed: int
    estimator: str = "grpo"
    lr: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.world}-{self.estimator}-{self.staleness}-{self.loss}-{self.seed}"

    @property
    def command(self) -> str:
        options = {"world": self.world, "estimator": self.estimator, "staleness": self.staleness, "loss": self.loss}
        flags = " ".join(f"--{name} {value}" for name, value in {**options, "seed": self.seed}.items())
        return f"python scripts/async_quality.py {flags}"


def all_jobs() -> list[Job]:
    """Seed by seed, so that those of an unfinished series can be compared; "ppo", the default so far, comes last."""
    needed = [job for seed in SEEDS for job in _jobs_of(seed) if job.loss != "ppo"]
    return [*needed, *(job for seed in SEEDS for job in _jobs_of(seed) if job.loss == "ppo")]


def tuning_jobs() -> list[Job]:
    """All corrections where staleness costs most, on other seeds: which of those that are not in LOSSES does best."""
    every = ("none", "tis", "decoupled", "interpolated", "icepop", "sequence_mask", "dppo", "cispo", "gspo")
    return [Job("grid", max(STALENESS), loss, seed) for seed in TUNING_SEEDS for loss in every]


def _jobs_of(seed: int) -> list[Job]:
    cells = [(0, "none"), *((s, loss) for loss in LOSSES for s in STALENESS)]
    worlds = [Job(world, s, loss, seed) for world in ("grid", "demo") for s, loss in cells]
    return [*worlds, *(Job("grid", s, "decoupled", seed, "gigpo") for s in (0, 2))]


# One run.


def grid_run(job: Job, models: Path) -> tuple[Any, Callable[[], Any]]:
    from toolwise.api import read_config, read_tasks
    from toolwise.training.run import assemble

    train, held_out = episodes()
    algorithm = {"adv_estimator": job.estimator, **({"omega": OMEGA} if job.estimator == "gigpo" else {})}
    settings = {
        "model": {"path": str(models / f"taught-{job.seed}"), "device": "cpu"},
        "data": {"batch_size": GRID_BATCH},
        "env": {"name": f"{ROOT / 'examples' / 'grid_world.py'}:GridEnv", "kwargs": {"max_turns": TURNS}},
        "rollout": {"n": GRID_N, "max_new_tokens": 1},
        "multi_turn": {"max_turns": TURNS, "max_invalid_in_a_row": TURNS},
        "reward": {"function": "env"},
        "algorithm": algorithm,
    }
    rows = read_tasks(grid_rows(train, **WORLD), "train")
    run = assemble(read_config(common(job) | settings), tasks=rows, validation_tasks=[])
    run = replace(run, scheduler=replace(run.scheduler, policy=OneWord(run.policy, {})))
    chances = Chances(run.policy)

    async def measure() -> dict[str, float]:
        return {"score": chances.mean(train), "held_out": chances.mean(held_out)}

    return run, measure


def demo_run(job: Job, models: Path) -> tuple[Any, Callable[[], Any]]:
    from toolwise.api import read_config, read_tasks
    from toolwise.demo.tasks import KINDS, make_rows
    from toolwise.training.evaluate import validate
    from toolwise.training.run import assemble

    settings = {
        "model": {"path": "builtin:small", "device": "cpu"},
        "data": {"batch_size": DEMO_BATCH},
        "tools": ["calculator", "search"],
        "rollout": {"n": DEMO_N, "max_new_tokens": 48},
        "multi_turn": {"max_turns": 4},
        "reward": {"function": "toolwise.demo.reward:small_world_reward", "sandbox": {"tier": "off"}},
    }
    train = list(make_rows(600, seed=job.seed, split="train", kinds=KINDS))
    held_out = list(make_rows(HELD_OUT, seed=job.seed, split="heldout", kinds=KINDS))
    run = assemble(
        read_config(common(job) | settings),
        tasks=read_tasks(train, "train"),
        validation_tasks=read_tasks(held_out, "heldout"),
    )

    async def measure() -> dict[str, float]:
        scored = await validate(run, step=0)
        return {"score": sum(s.score for s in scored) / len(scored)}

    return run, measure


def common(job: Job) -> dict[str, Any]:
    return {
        "name": job.name,
        "seed": job.seed,
        "deterministic": True,
        "actor": {"lr": job.lr or RATES[job.world, job.estimator], "warmup_steps": 3, "policy_loss": job.loss},
        "trainer": {
            "mode": "async",
            "max_staleness": job.staleness,
            "total_steps": STEPS[job.world],
            "console": False,
        },
    }


def warm_start(models: Path, seed: int) -> None:
    """Make the grid agent's warm start, one for each seed; the first run makes it, others wait."""
    import toolwise

    models.mkdir(parents=True, exist_ok=True)
    taught = models / f"taught-{seed}"
    with (models / f"{seed}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not taught.exists():
            fresh, partial = models / f"fresh-{seed}", models / f"partial-{seed}"
            for folder in (fresh, partial):
                shutil.rmtree(folder, ignore_errors=True)
            fresh_model(fresh, seed)
            rows = list(taught_walks(episodes()[0], seed))
            toolwise.sft(str(fresh), rows, partial, steps=250, batch_tokens=2048, row_tokens=128, lr=4e-3, seed=seed)
            partial.rename(taught)


async def learn(job: Job, models: Path, write: Callable[..., None]) -> None:
    from toolwise.training.async_loop import AsyncLoop

    run, measure = (grid_run if job.world == "grid" else demo_run)(job, models)
    loop, made = AsyncLoop(run), 0
    every = 1 if job.world == "grid" else EVALUATE_EVERY
    try:
        write(step=0, rollouts=0, **await measure())
        for step in range(1, STEPS[job.world] + 1):
            metrics = (await loop.train_step(run)).metrics
            made += int(metrics["rollouts"])
            kept = {name: round(value, 5) for name, value in metrics.items() if name.startswith(KEPT)}
            write(step=step, rollouts=made, **(await measure() if step % every == 0 else {}), **kept)
    finally:
        await loop.close()
        run.close()


KEPT = ("staleness/", "actor/entropy", "actor/grad_norm", "actor/importance", "actor/clip", "score/mean", "time/step_s")


def work(job: Job, path: Path) -> None:
    import torch

    torch.set_num_threads(1)
    if (record := read_record(path)) is not None and record.job == job:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with path.open("w", encoding="utf-8", buffering=1) as lines:

        def write(**line: Any) -> None:
            lines.write(json.dumps({**line, "s": round(time.monotonic() - began, 2)}) + "\n")

        write(job=asdict(job))
        if job.world == "grid":
            warm_start(path.parent / "models", job.seed)
        asyncio.run(learn(job, path.parent / "models", write))
        write(done=True)


# The report.


@dataclass(frozen=True)
class Record:
    job: Job
    curve: list[tuple[int, float]]
    """(rollouts, score)"""
    ess: float
    """The effective sample size of the importance weights, mean over the steps."""
    seconds: float

    @property
    def area(self) -> float:
        """The mean score after the start: how fast, and how well."""
        return sum(score for _, score in self.curve[1:]) / len(self.curve[1:])

    @property
    def final(self) -> float:
        """The mean score over the last quarter."""
        last = self.curve[1:][-max(1, len(self.curve) // 4) :]
        return sum(score for _, score in last) / len(last)


def read_record(path: Path) -> Record | None:
    """The finished run in a file, if there is one."""
    if not path.exists():
        return None
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    if not lines or not lines[-1].get("done"):
        return None
    ess = [line["staleness/ess"] for line in lines if "staleness/ess" in line]
    curve = [(line["rollouts"], line["score"]) for line in lines if "score" in line]
    return Record(Job(**lines[0]["job"]), curve, sum(ess) / len(ess) if ess else 1.0, lines[-1]["s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", choices=sorted(STEPS))
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--loss", default="none", help="actor.policy_loss")
    parser.add_argument("--estimator", default="grpo", choices=("grpo", "gigpo"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=0.0, help="another learning rate, to tune it")
    parser.add_argument("--out", type=Path, help="file of the run")
    parser.add_argument("--commands", metavar="FOLDER", help="print the command lines of all runs")
    parser.add_argument("--tuning", action="store_true", help="--commands: of the runs on tuning seeds")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="print the tables of all runs")
    parser.add_argument("--picture", type=Path, help="file for the curves")
    args = parser.parse_args()
    if args.commands:
        jobs = tuning_jobs() if args.tuning else all_jobs()
        print("\n".join(f"{job.command} --out {args.commands}/{job.name}.jsonl" for job in jobs))
    elif args.report:
        from async_quality_report import report

        print(report(args.report, args.picture))
    elif args.world and args.out:
        work(Job(args.world, args.staleness, args.loss, args.seed, args.estimator, args.lr), args.out)
    else:
        sys.exit("give --world and --out, --commands or --report")


if __name__ == "__main__":
    main()
