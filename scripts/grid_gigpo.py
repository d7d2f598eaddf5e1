"""Compare GiGPO with GRPO on a small grid world with a sparse reward; also PPO with a critic, and KL control.

    python scripts/grid_gigpo.py --jobs 16 --limit-s 500 --out runs/grid --records runs/grid.jsonl
    python scripts/grid_report.py --records runs/grid.jsonl --picture docs/images/grid_gigpo.png > section.md

Every run is a separate process and writes OUT/runs/NAME.jsonl: one line per step, and a last one with `"done": true`.
Finished runs with unchanged settings are not repeated, so a call that hit its time limit can be continued by another
call. The records are one file of all finished runs. The results are in docs/results.md. Fixed before any paired run, on
other seeds:

    reached     the first step after which the probability of success, averaged over all training starts, is at least
                90 % (exact: `grid_agent.py`), counted in rollouts so far; "not" if the run never gets there
    sweep       the same learning rates for both, on separate seeds (100 to 105); the best needs the fewest rollouts to
                90 % on average, where not reached counts as twice the run
    paired      seeds 0 to 9; each starts from its own model, trained by `toolwise.sft`, the same for all algorithms
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from grid_agent import ROOT, TURNS, WORLD, Chances, OneWord, episodes, fresh_model, taught_walks
from grid_world import make_rows
from processes import run_all

RATES = [2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3]
TUNING_SEEDS = list(range(100, 106))
PAIRED_SEEDS = list(range(10))
OTHER_SEEDS = [0, 1, 2]
STEPS, TASKS, ROLLOUTS = 90, 4, 8
LONGER = 100
"""Steps of the runs with a critic or with KL control."""
WANTED = 0.9
OMEGA = 0.2
"""The episode's share in GiGPO's advantage; the rest is the step's. Chosen, like the environment, by simulation."""
KL_TARGET = 0.1


@dataclass(frozen=True)
class Job:
    """One run, or one warm start."""

    name: str
    kind: str
    """warm, sweep, paired, ppo or kl"""
    estimator: str
    seed: int
    lr: float = 0.0
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    steps: int = STEPS
    stop_early: bool = False
    """Stop once the target is reached: the rest of the curve is not used."""


def sweep_jobs() -> list[Job]:
    return [
        Job(f"sweep-{estimator}-{lr:g}-{seed}", "sweep", estimator, seed, lr, stop_early=True)
        for seed in TUNING_SEEDS
        for estimator in ("grpo", "gigpo")
        for lr in sorted(RATES)
    ]


def paired_jobs(best: dict[str, float]) -> list[Job]:
    return [
        Job(f"paired-{estimator}-{seed}", "paired", estimator, seed, lr, stop_early=True)
        for seed in PAIRED_SEEDS
        for estimator, lr in best.items()
    ]


def other_jobs() -> list[Job]:
    """PPO with a critic; GiGPO with KL only measured, in the loss, and in the reward."""
    ppo = {"critic": {"lr": 1e-3}, "algorithm": {"gae_per": "turn", "gamma": 0.95}}
    kinds = {
        "free": {"kl": "loss", "kl_coef": 0.0},
        "loss": {"kl": "loss", "kl_coef": 0.4, "kl_target": KL_TARGET, "kl_horizon": 400},
        "reward": {"kl": "reward", "kl_coef": 0.1, "kl_target": KL_TARGET, "kl_horizon": 400},
    }
    return [Job(f"ppo-{seed}", "ppo", "gae", seed, 1e-3, ppo, steps=LONGER) for seed in OTHER_SEEDS] + [
        Job(f"kl-{name}-{seed}", "kl", "gigpo", seed, 1e-3, {"algorithm": settings}, steps=LONGER)
        for seed in OTHER_SEEDS
        for name, settings in kinds.items()
    ]


# One run.


def warm_start(job: Job, out: Path, write: Callable[..., None]) -> None:
    import toolwise

    fresh, partial, taught = (out / "models" / f"{part}{job.seed}" for part in ("fresh-", ".taught-", "taught-"))
    for folder in (fresh, partial, taught):
        shutil.rmtree(folder, ignore_errors=True)
    fresh_model(fresh, job.seed)
    rows = list(taught_walks(episodes()[0], job.seed))
    figures = toolwise.sft(
        str(fresh), rows, partial, steps=250, batch_tokens=2048, row_tokens=128, lr=4e-3, seed=job.seed
    )
    partial.rename(taught)  # atomic
    write(rows=len(rows), loss=figures["loss"])


def settings_of(job: Job, out: Path) -> dict[str, Any]:
    settings: dict[str, dict[str, Any]] = {
        "model": {"path": str(out / "models" / f"taught-{job.seed}"), "device": "cpu"},
        "data": {"batch_size": TASKS},
        "env": {"name": f"{ROOT / 'examples' / 'grid_world.py'}:GridEnv", "kwargs": {"max_turns": TURNS}},
        "rollout": {"n": ROLLOUTS, "max_new_tokens": 1},
        "multi_turn": {"max_turns": TURNS, "max_invalid_in_a_row": TURNS},
        "reward": {"function": "env"},
        "algorithm": {"adv_estimator": job.estimator, **({"omega": OMEGA} if job.estimator == "gigpo" else {})},
        "actor": {"lr": job.lr, "warmup_steps": 3},
        "trainer": {"total_steps": job.steps, "console": False},
    }
    for section, values in job.changes.items():
        settings.setdefault(section, {}).update(values)
    return {"name": job.name, "seed": job.seed, "deterministic": True, **settings}


async def learn(job: Job, out: Path, write: Callable[..., None]) -> None:
    """The loop of `toolwise train` without checkpoints: repeating a run of a minute is faster than resuming it."""
    from toolwise.api import read_config, read_tasks
    from toolwise.training.loop import train_step
    from toolwise.training.run import assemble

    train, held_out = episodes()
    run = assemble(read_config(settings_of(job, out)), tasks=read_tasks(make_rows(train, **WORLD), "train"))
    run = replace(run, scheduler=replace(run.scheduler, policy=OneWord(run.policy, {})))
    chances = Chances(run.policy)
    made = 0

    def now() -> dict[str, float]:
        return {"chance": round(chances.mean(train), 5), "held_out": round(chances.mean(held_out), 5)}

    try:
        write(step=0, rollouts=0, **now())
        for step in range(1, job.steps + 1):
            metrics = (await train_step(run)).metrics
            made += int(metrics["rollouts"])
            kept = {k: round(v, 5) for k, v in metrics.items() if k.startswith(KEPT)}
            after = now()
            write(step=step, rollouts=made, success=metrics["score/mean"], **after, **kept)
            if job.stop_early and after["chance"] >= WANTED:
                break
    finally:
        run.close()


KEPT = (
    "gigpo/",
    "kl/",
    "turns/mean",
    "actor/entropy",
    "actor/grad_norm",
    "critic/explained",
    "time/step_s",
    "frac_zero",
)


def work(job: Job, out: Path) -> None:
    """Run one job; called in a separate process."""
    began = time.monotonic()
    path = out / "runs" / f"{job.name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", buffering=1) as lines:

        def write(**line: Any) -> None:
            lines.write(json.dumps({**line, "s": round(time.monotonic() - began, 2)}) + "\n")

        write(job=asdict(job), world=WORLD, turns=TURNS, tasks=TASKS, n=ROLLOUTS)
        if job.kind == "warm":
            warm_start(job, out, write)
        else:
            asyncio.run(learn(job, out, write))
        write(done=True)


# All runs.


@dataclass(frozen=True)
class Record:
    """A finished run, as stored on disk."""

    job: Job
    lines: list[dict[str, Any]]
    seconds: float

    @property
    def curve(self) -> list[tuple[int, float]]:
        """Rollouts so far, and the probability of success after them."""
        return [(line["rollouts"], line["chance"]) for line in self.lines if "chance" in line]

    @property
    def reached(self) -> int | None:
        """Rollouts until the target success; None if never reached."""
        return next((made for made, chance in self.curve if chance >= WANTED), None)


def finished(out: Path) -> dict[str, Record]:
    found = {}
    for path in sorted((out / "runs").glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
        if lines and lines[-1].get("done"):
            found[path.stem] = Record(Job(**lines[0]["job"]), lines[1:-1], lines[-1]["s"])
    return found


def write_records(records: dict[str, Record], path: Path) -> None:
    """All finished runs, one per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(r)) + "\n" for r in records.values()), encoding="utf-8")


def read_records(path: Path) -> dict[str, Record]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["job"]["name"]: Record(Job(**row["job"]), row["lines"], row["seconds"]) for row in rows}


def mean_rollouts(records: dict[str, Record], estimator: str, lr: float) -> float:
    own = [records[job.name] for job in sweep_jobs() if (job.estimator, job.lr) == (estimator, lr)]
    return sum(r.reached or 2 * STEPS * TASKS * ROLLOUTS for r in own) / len(own)


def best_rates(records: dict[str, Record]) -> dict[str, float] | None:
    """Best rate of each algorithm; None until the sweep is finished."""
    if not all(job.name in records for job in sweep_jobs()):
        return None
    return {e: min(RATES, key=lambda lr: mean_rollouts(records, e, lr)) for e in ("grpo", "gigpo")}


def pending(out: Path) -> tuple[list[Job], bool]:
    """Jobs that can start now, most urgent first; and whether no further ones will follow."""
    records = finished(out)
    best = best_rates(records)
    wanted = [*(paired_jobs(best) if best else sweep_jobs()), *other_jobs()]
    seeds = sorted({job.seed for job in wanted}, key=lambda seed: (seed not in TUNING_SEEDS, seed))
    warm = [Job(f"warm-{seed}", "warm", "sft", seed) for seed in seeds]
    missing = [job for job in [*warm, *wanted] if job.name not in records or records[job.name].job != job]
    return [job for job in missing if job.kind == "warm" or f"warm-{job.seed}" in records], best is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for models and runs")
    parser.add_argument("--records", type=Path, help="write all finished runs to this file")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="concurrent runs")
    parser.add_argument("--limit-s", type=float, default=1e9, help="stop after this time; call again to continue")
    args = parser.parse_args()
    (args.out / "runs").mkdir(parents=True, exist_ok=True)
    whole = run_all(lambda: pending(args.out), work, args.out, jobs=args.jobs, limit_s=args.limit_s)
    records = finished(args.out)
    if args.records is not None:
        write_records(records, args.records)
    print(f"{len(records)} runs finished; {'all done' if whole else 'not all done: call again'}")
    print(json.dumps({"best": best_rates(records), "reached": {n: r.reached for n, r in records.items() if r.curve}}))
    sys.exit(0 if whole else 75)


if __name__ == "__main__":
    main()
