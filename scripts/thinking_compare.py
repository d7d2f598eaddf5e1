"""Compare forms of RLVCR with GRPO, GRPO with a token price, and GiGPO on learning how hard to think: docs/results.md.

    python scripts/thinking_compare.py --model runs/rooms/taught --out runs/thinking --records runs/thinking.jsonl
    python scripts/thinking_report.py --records runs/thinking.jsonl --picture docs/images/thinking.png > section.md

All arms start from the same SFT model (`scripts/thinking_warm_start.py`), which samples its levels uniformly, and learn
in the rooms environment. Every run is a separate process and writes OUT/runs/NAME.jsonl: one line per step, one per
evaluation, and a last one with `"done": true`. Finished runs are not repeated, so a call that hit its time limit can be
continued by another call. The arms, and what was fixed beforehand, are in `thinking_plan.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from processes import run_all
from thinking_plan import (
    ARMS,
    COMPARISONS,
    EVALUATED,
    FIRST,
    HOUSES,
    LIMIT,
    RATES,
    ROLLOUTS,
    TASKS,
    TRAINED_ON,
    TUNING_HOUSES,
    Comparison,
    Job,
    paired_jobs,
    sweep_jobs,
)

os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", TOKENIZERS_PARALLELISM="false")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src")]

# One run.


def settings_of(job: Job, model: Path, device: str) -> dict[str, Any]:
    from toolwise.demo.rooms.env import rooms_config

    arm, settings = ARMS[job.arm], rooms_config(model, seed=job.seed)
    settings["name"] = job.name
    settings["model"]["device"] = device
    settings["data"]["batch_size"] = TASKS
    settings["rollout"] |= {"n": ROLLOUTS, "cache_mb": 512}  # all runs share one GPU
    settings["reward"]["sandbox"] = {"tier": "off"}  # the environment's own reward is trusted
    settings["algorithm"] = {"adv_estimator": arm.estimator, "rlvcr": {"enable": True, **arm.rlvcr}}
    settings["actor"] |= {"lr": job.lr, "lr_schedule": "linear", "mismatch_check": "warn"}
    settings["trainer"] |= {"total_steps": job.evaluated[-1]}
    return settings


async def learn(job: Job, model: Path, device: str, write: Callable[..., None]) -> None:
    """The loop of `toolwise train` without checkpoints: repeating a run of minutes is faster than resuming it."""
    import torch

    from toolwise.api import read_config, read_tasks
    from toolwise.demo.rooms.demonstrations import task_rows
    from toolwise.training.loop import train_step
    from toolwise.training.run import assemble

    torch.set_num_threads(1)
    tasks = read_tasks(list(task_rows(range(TRAINED_ON), "train")), "train")
    run = assemble(read_config(settings_of(job, model, device), job.changes), tasks=tasks)
    try:
        for step in range(1, job.evaluated[-1] + 1):
            metrics = (await train_step(run)).metrics
            kept = {name: round(value, 5) for name, value in metrics.items() if name.startswith(KEPT)}
            write(step=step, success=round(metrics["score/mean"], 5), **kept)
            if step in job.evaluated:
                write(evaluation={**await evaluate(run, job), "after": step})
    finally:
        run.close()


KEPT = (
    "thinking/easy/",
    "thinking/hard/",
    "thinking/tokens_per_step",
    "thinking/lambda",
    "thinking/advantage",
    "thinking/groups",
    "thinking/added_tokens_ratio",
    "thinking/format_valid",
    "turns/mean",
    "tokens/sampled",
    "actor/entropy",
    "actor/grad_norm",
    "actor/skipped",
    "time/step_s",
    "frac_zero",
)


async def evaluate(run: Any, job: Job) -> dict[str, Any]:
    """One episode per house, sampled at temperature 1. Tuning uses separate houses, after those of the paired runs."""
    from toolwise.api import read_tasks
    from toolwise.demo.rooms.demonstrations import task_rows
    from toolwise.thinking.step_selection import parse_steps
    from toolwise.training.evaluate import score

    first = HOUSES if job.kind == "sweep" else 0
    tasks = read_tasks(list(task_rows(range(first, first + job.houses), "heldout")), "heldout")
    decisions = run.router.decide(tasks, 1, 0, label="eval", explore=False)
    scored = await score(run, await run.scheduler.roll_out(decisions, do_sample=True))
    steps = defaultdict(list)
    levels: dict[str, Counter[int]] = {"easy": Counter(), "hard": Counter()}
    right: dict[str, Counter[int]] = {"easy": Counter(), "hard": Counter()}
    optimal = {
        (s.rollout.rollout_id, i): bool(step.step_info.get("optimal")) for s in scored for i, step in enumerate(s.steps)
    }
    for step in parse_steps(scored, run.chat):
        steps[step.rollout_id].append(step)
        if step.kind in levels and step.reply.level is not None:
            levels[step.kind][step.reply.level] += 1
            right[step.kind][step.reply.level] += optimal[step.rollout_id, step.index]
    by_house = sorted(scored, key=lambda s: s.rollout.batch_data_id)
    every = [step for s in by_house for step in steps[s.rollout.rollout_id]]
    return {
        "success": "".join(str(int(s.score >= 1.0)) for s in by_house),
        "steps": [len(steps[s.rollout.rollout_id]) for s in by_house],
        "thinking_tokens": [sum(step.thinking_tokens for step in steps[s.rollout.rollout_id]) for s in by_house],
        "levels": {kind: [count[level] for level in (1, 2, 3, 4)] for kind, count in levels.items()},
        "right": {kind: [count[level] for level in (1, 2, 3, 4)] for kind, count in right.items()},
        "format_valid": sum(step.reply.valid for step in every) / max(1, len(every)),
    }


def work(job: Job, model: Path, out: Path, device: str) -> None:
    """Run one job; called in a separate process."""
    began = time.monotonic()
    path = out / "runs" / f"{job.name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", buffering=1) as lines:

        def write(**line: Any) -> None:
            lines.write(json.dumps({**line, "s": round(time.monotonic() - began, 2)}) + "\n")

        write(job=asdict(job), settings=settings_of(job, model, device))
        asyncio.run(learn(job, model, device, write))
        write(done=True)


# All runs.


@dataclass(frozen=True)
class Evaluation:
    """Results in the held-out houses, per house."""

    after: int
    """Training steps before this evaluation."""
    success: str
    """One digit per house."""
    steps: list[int]
    thinking_tokens: list[int]
    levels: dict[str, list[int]]
    """Kind of step -> count of each level."""
    right: dict[str, list[int]]
    """The same, for correct steps only."""
    format_valid: float

    @property
    def share(self) -> float:
        return self.success.count("1") / len(self.success)

    @property
    def tokens(self) -> float:
        """Thinking tokens per step."""
        return sum(self.thinking_tokens) / max(1, sum(self.steps))


@dataclass(frozen=True)
class Record:
    """A finished run, as stored on disk."""

    job: Job
    lines: list[dict[str, Any]]
    """One per step."""
    evaluations: list[Evaluation]
    seconds: float

    def at(self, after: int) -> Evaluation:
        return next(e for e in self.evaluations if e.after == after)

    @property
    def worth(self) -> float:
        priced = ARMS[self.job.arm].priced
        worths = [e.share - 0.01 * max(0.0, e.tokens - LIMIT) * priced for e in self.evaluations]
        return sum(worths) / len(worths)


def finished(out: Path) -> dict[str, Record]:
    found = {}
    for path in sorted((out / "runs").glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
        if lines and lines[-1].get("done"):
            steps = [line for line in lines if "step" in line]
            evaluations = [Evaluation(**line["evaluation"]) for line in lines if "evaluation" in line]
            found[path.stem] = Record(_job(lines[0]["job"]), steps, evaluations, lines[-1]["s"])
    return found


def _job(told: dict[str, Any]) -> Job:
    return Job(**{**told, "evaluated": tuple(told["evaluated"]), "changes": tuple(told["changes"])})


def write_records(records: dict[str, Record], path: Path) -> None:
    """All finished runs, one per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(r)) + "\n" for r in records.values()), encoding="utf-8")


def read_records(path: Path) -> dict[str, Record]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {
        row["job"]["name"]: Record(
            _job(row["job"]), row["lines"], [Evaluation(**e) for e in row["evaluations"]], row["seconds"]
        )
        for row in rows
    }


def mean_worth(records: dict[str, Record], arm: str, lr: float) -> float:
    own = [records[job.name] for job in sweep_jobs() if (job.arm, job.lr) == (arm, lr)]
    return sum(r.worth for r in own) / len(own)


def best_rates(records: dict[str, Record]) -> dict[str, float] | None:
    """Best rate of each arm that does not borrow one; None until the sweep is finished."""
    if not all(job.name in records for job in sweep_jobs()):
        return None
    arms = [name for name, arm in ARMS.items() if not arm.rate_of]
    return {arm: max(RATES, key=lambda lr: mean_worth(records, arm, lr)) for arm in arms}


def pending(out: Path, lr: float | None = None, comparison: Comparison = FIRST) -> tuple[list[Job], bool]:
    """Jobs that can start now, most urgent first; whether no further ones follow. `lr`: one rate for all, no sweep."""
    records = finished(out)
    best = best_rates(records) if lr is None else dict.fromkeys(ARMS, lr)
    wanted = sweep_jobs() if best is None else paired_jobs(best, comparison)
    missing = [job for job in wanted if job.name not in records or records[job.name].job != job]
    return missing, best is not None


def one(job: Job, model: Path, out: Path, device: str) -> None:
    """Make a single run and print its result."""
    work(job, model, out, device)
    record = finished(out)[job.name]
    last = record.evaluations[-1]
    found = {"name": job.name, "success": last.share, "tokens": last.tokens, "levels": last.levels}
    times = [line["time/step_s"] for line in record.lines]
    print(json.dumps({**found, "step_s": sum(times[1:]) / max(1, len(times) - 1), "whole_s": record.seconds}))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder `taught` of scripts/thinking_warm_start.py")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--comparison", choices=list(COMPARISONS), default="first", help="arms and seeds")
    parser.add_argument("--records", type=Path, help="write all finished runs to this file")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="concurrent runs")
    parser.add_argument("--limit-s", type=float, default=1e9, help="stop after this time; call again to continue")
    parser.add_argument("--device", default="cpu", help="torch device")
    parser.add_argument("--only", choices=list(ARMS), help="make a single run of this arm")
    parser.add_argument("--name", help="name of the single run")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="settings of the single run")
    parser.add_argument("--seed", type=int, default=100, help="seed of the single run")
    parser.add_argument("--lr", type=float, help="learning rate of all arms, instead of the sweep")
    parser.add_argument("--steps", type=int, default=EVALUATED[-1], help="steps of the single run")
    parser.add_argument("--houses", type=int, default=TUNING_HOUSES, help="evaluation houses of the single run")
    args = parser.parse_args(arguments)
    (args.out / "runs").mkdir(parents=True, exist_ok=True)
    if args.only:
        lr = args.lr or RATES[-1]
        name = args.name or f"one-{args.only}-{lr:g}-{args.seed}"
        job = Job(name, "one", args.only, args.seed, lr, (args.steps,), args.houses, tuple(args.set))
        one(job, args.model, args.out, args.device)
        return
    whole = run_all(
        lambda: pending(args.out, args.lr, COMPARISONS[args.comparison]),
        work,
        *(args.model, args.out, args.device),
        jobs=args.jobs,
        limit_s=args.limit_s,
    )
    records = finished(args.out)
    if args.records is not None:
        write_records(records, args.records)
    print(f"{len(records)} runs finished; {'all done' if whole else 'not all done: call again'}")
    print(json.dumps({"best": best_rates(records)}))
    sys.exit(0 if whole else 75)


if __name__ == "__main__":
    main()
