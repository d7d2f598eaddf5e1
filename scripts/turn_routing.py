"""Routing at every turn against routing once per prompt, at equal cost, on questions whose second call only the first
one's result can settle (scripts/turn_actor.py): same actor, same routes, same questions, both tuned alike.

    python scripts/turn_actor.py --out runs/turns/actor
    python scripts/turn_routing.py --out runs/turns --tune --jobs 2
    python scripts/turn_routing.py --out runs/turns --seeds 10 11 12 13 14 --jobs 2
    python scripts/turn_routing.py --out runs/turns --seeds 10 11 12 13 14 --report

Rules, fixed before any of these seeds was run:

1. Both arms have the four routes of `ROUTES`, and train a head on the same frozen actor: the same number of steps,
   prompts and rollouts. `turn` chooses before every turn, `prompt` once. Each has the settings of `CANDIDATES` that did
   best for it on the tuning seeds: those with the highest mean lead over the best mixture of fixed routes at its cost.
2. Each is calibrated to the same budget on tasks of its own, as by default, and then answers 400 fresh questions, the
   same for both, as `toolwise run` does: greedily, with its calibrated routes.
3. Reported for each seed: score and cost of both, and the score of the best mixture of fixed routes at the cost of
   `turn` (on the same questions), which no router that reads these prompts only can beat on average. `turn` wins if the
   95 % intervals, over the seeds, of its lead over `prompt` and over that mixture are above 0.

What is done is not repeated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from turn_actor import TOOLS, make_task

ARMS = ("turn", "prompt")
BUDGET = 1.4
"""Calls per question: half of the questions need one, half of them two."""
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""Student's t by number of seeds."""
ROUTES = [
    {"name": "answer"},
    {"name": "search", "tools": ["search"]},
    {"name": "calculate", "tools": ["calculator"]},
    {"name": "both", "tools": ["search", "calculator"]},
]
TRAIN, CALIBRATION, FRESH = 1200, 128, 400
STEPS = 40
TUNING_SEEDS = (100, 101)
CANDIDATES: list[dict[str, float]] = [
    {"lr": 3e-3, "entropy_coef": 0.2, "multiplier": 0.3},
    {"lr": 1e-2, "entropy_coef": 0.2, "multiplier": 0.3},
    {"lr": 3e-3, "entropy_coef": 0.05, "multiplier": 0.3},
    {"lr": 3e-3, "entropy_coef": 0.2, "multiplier": 0.5},
]
"""Settings that are tried, the same for both arms. The multiplier is the λ of a call."""


def rows(split: str, seed: int, count: int) -> list[dict[str, Any]]:
    rng = Random(f"turn routing/{split}/{seed}")
    return [make_task(rng, index, "train" if split == "train" else "heldout") for index in range(count)]


def settings(arm: str, seed: int, actor: Path, candidate: int) -> dict[str, Any]:
    chosen = CANDIDATES[candidate]
    router: dict[str, Any] = {
        "enable": True,
        "train_actor": False,
        "cost": "calls",
        "wording": "silent",
        "routes": ROUTES,
        "scale_inputs": True,
        "lr": chosen["lr"],
        "epochs": 4,
        "entropy_coef": chosen["entropy_coef"],
        "entropy_final": 0.01,
        # λ stays: in so few steps it would only oscillate. The calibration delivers the budget.
        "budgets": [{"limit": BUDGET, "initial": chosen["multiplier"], "rate": 0.0, "proportional": 0.0}],
        "calibration": CALIBRATION / TRAIN,
        # 512 rollouts for four routes, and at most 512 in passes over 128 tasks.
        "calibration_rollouts": CALIBRATION,
    }
    if arm == "turn":
        router |= {"every": "turn", "turn_mask": "decode", "calibration_passes": 4}
    return {
        "name": f"{arm}-{seed}",
        "seed": seed,
        "model": {"path": str(actor.resolve())},
        "data": {"batch_size": 12},
        "tools": TOOLS,
        "rollout": {"n": 8, "max_new_tokens": 48},
        "multi_turn": {"max_turns": 6},
        "reward": {
            "function": "toolwise.demo.reward:small_world_reward",
            "kwargs": {"price_per_call": 0.0},
            "sandbox": {"trusted": ["toolwise.demo.reward"]},
        },
        "router": router,
        "validation": {"before": False},
        "trainer": {"total_steps": STEPS, "save_every": STEPS, "console": False},
    }


@dataclass(frozen=True)
class Run:
    """One arm with one seed."""

    arm: str
    seed: int
    out: Path
    candidate: int

    @property
    def folder(self) -> Path:
        return self.out / f"{self.arm}-{self.seed}-{self.candidate}"

    def result(self, name: str) -> Path:
        """Outcomes on the fresh questions: of the arm, or of a fixed route."""
        return self.folder / f"{name}.json"

    def make(self, routes: Sequence[str]) -> None:
        """Train, calibrate, and answer the fresh questions, as the router chooses and on each of `routes`."""
        import torch

        import toolwise

        torch.set_num_threads(1)
        if not (self.folder / "summary.json").exists():
            toolwise.train(
                settings(self.arm, self.seed, self.out / "actor", self.candidate),
                tasks=rows("train", self.seed, TRAIN),
                val=rows("validation", self.seed, 8),
                out=self.folder,
            )
        for name in ("auto", *routes):  # what fixed routes give does not depend on the head
            if not self.result(name).exists():
                self.result(name).write_text(json.dumps(asyncio.run(measure(self.folder, self.seed, name))))
            score, cost = means(json.loads(self.result(name).read_text()))
            print(f"{self.folder.name}, {name}: score {score:.3f}, cost {cost:.3f}", flush=True)


def make_all(runs: Sequence[tuple[Run, Sequence[str]]], jobs: int) -> None:
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for done in [pool.submit(run.make, routes) for run, routes in runs]:
            done.result()


async def measure(run: Path, seed: int, route: str = "auto") -> list[dict[str, Any]]:
    """Score and cost of each fresh question, answered as the agent answers by default, or on a given route."""
    import toolwise
    from toolwise.concurrency.deadlines import gather_all
    from toolwise.data.rows import tasks_from_rows
    from toolwise.demo.reward import small_world_reward

    agent = toolwise.load(run)
    tasks = tasks_from_rows(Path("fresh"), rows("fresh", 10_000 + seed, FRESH))
    answers = await gather_all(agent.aask(task, route=route) for task in tasks)
    measured = []
    for task, answer in zip(tasks, answers, strict=True):
        result = small_world_reward(list(answer.rollout.messages), task.ground_truth, price_per_call=0.0)
        measured.append(
            {"easy": task.extra_info["easy"], "score": result.score, "cost": answer.cost, "route": answer.route}
        )
    return measured


def means(measured: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Score and cost."""
    return fmean(row["score"] for row in measured), fmean(row["cost"] for row in measured)


def best_mixture(points: Sequence[tuple[float, float]], cost: float) -> float:
    """The highest score that a mixture of (score, cost) points has at `cost`."""
    best = max((score for score, at in points if at <= cost), default=0.0)
    for low_score, low in points:
        for high_score, high in points:
            if low <= cost < high:
                best = max(best, low_score + (high_score - low_score) * (cost - low) / (high - low))
    return best


def interval(values: Sequence[float]) -> str:
    """Mean and 95 % interval over seeds."""
    if len(values) < 2:
        return f"{fmean(values):+.3f}"
    half = T_95.get(len(values), 2.0) * stdev(values) / len(values) ** 0.5
    return f"{fmean(values):+.3f} [{fmean(values) - half:+.3f} {fmean(values) + half:+.3f}]"


def stored(run: Run, name: str = "auto") -> list[dict[str, Any]]:
    measured: list[dict[str, Any]] = json.loads(run.result(name).read_text())
    return measured


def mixture_at(run: Run, cost: float) -> float:
    """The score of the best mixture of fixed routes, measured in `run`, at a cost."""
    return best_mixture([means(stored(run, route["name"])) for route in ROUTES], cost)


def tuning_runs(out: Path) -> dict[str, list[list[Run]]]:
    """arm -> the runs of each candidate, one per tuning seed"""
    numbers = range(len(CANDIDATES))
    return {arm: [[Run(arm, seed, out, number) for seed in TUNING_SEEDS] for number in numbers] for arm in ARMS}


def choose(out: Path) -> dict[str, int]:
    """The best candidate of each arm; prints what all of them gave."""
    chosen = {}
    print("| arm | settings | score at cost, by tuning seed | mean lead over the best mixture |\n|---|---|---|---|")
    for arm, candidates in tuning_runs(out).items():
        leads = []
        for number, runs in enumerate(candidates):
            points = [means(stored(run)) for run in runs]
            fixed = [
                mixture_at(Run("prompt", run.seed, out, 0), cost) for run, (_, cost) in zip(runs, points, strict=True)
            ]
            leads.append(fmean(score - best for (score, _), best in zip(points, fixed, strict=True)))
            cells = ", ".join(f"{score:.3f} at {cost:.3f}" for score, cost in points)
            named = ", ".join(f"{name} {value:g}" for name, value in CANDIDATES[number].items())
            print(f"| {arm} | {named} | {cells} | {leads[-1]:+.3f} |")
        chosen[arm] = max(range(len(leads)), key=leads.__getitem__)
    return chosen


def report(out: Path, seeds: Sequence[int], chosen: Mapping[str, int]) -> None:
    print(f"\nchosen: {', '.join(f'{arm} {number}' for arm, number in chosen.items())}\n")
    columns = ("seed", "every turn", "cost", "once per prompt", "cost", "best mixture at the cost of every turn")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    differences: dict[str, list[float]] = {"score": [], "cost": [], "score less the best mixture's": []}
    for seed in seeds:
        runs = {arm: Run(arm, seed, out, chosen[arm]) for arm in ARMS}
        turn, prompt = (means(stored(run)) for run in runs.values())
        mixture = mixture_at(runs["prompt"], turn[1])
        cells = [f"{turn[0]:.3f}", f"{turn[1]:.3f}", f"{prompt[0]:.3f}", f"{prompt[1]:.3f}", f"{mixture:.3f}"]
        print(f"| {seed} | {' | '.join(cells)} |")
        gaps = (turn[0] - prompt[0], turn[1] - prompt[1], turn[0] - mixture)
        for name, gap in zip(differences, gaps, strict=True):
            differences[name].append(gap)
    for name, values in differences.items():
        print(f"every turn less once per prompt: {name} {interval(values)}")
    print("\n| | score, sum known | cost | score, sum not known | cost |\n|---|---|---|---|---|")
    pairs = [(arm, "auto") for arm in ARMS] + [("prompt", route["name"]) for route in ROUTES]
    for arm, name in pairs:
        pooled = [row for seed in seeds for row in stored(Run(arm, seed, out, chosen[arm]), name)]
        cells = [f"{value:.3f}" for easy in (True, False) for value in means([r for r in pooled if r["easy"] == easy])]
        print(f"| {arm if name == 'auto' else name} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs, with the actor in it")
    parser.add_argument("--seeds", type=int, nargs="+", default=(), help="seeds; with --tune, of the tuning seeds")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS, help="arms to run")
    parser.add_argument("--tune", action="store_true", help="run the candidates on the tuning seeds")
    parser.add_argument("--candidates", type=int, nargs="+", help="--tune: only these, by number")
    parser.add_argument("--untuned", action="store_true", help="with the first candidate for both arms")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--report", action="store_true", help="only print the tables")
    args = parser.parse_args()
    if args.report:
        return report(args.out, args.seeds, dict.fromkeys(ARMS, 0) if args.untuned else choose(args.out))
    if args.tune:
        runs = [
            run
            for arm, candidates in tuning_runs(args.out).items()
            for number, each in enumerate(candidates)
            for run in each
            if arm in args.arms
            and (not args.seeds or run.seed in args.seeds)
            and (args.candidates is None or number in args.candidates)
        ]
    else:
        chosen = dict.fromkeys(ARMS, 0) if args.untuned else choose(args.out)
        runs = [Run(arm, seed, args.out, chosen[arm]) for arm in args.arms for seed in args.seeds]
    # Fixed routes are measured once per seed.
    routes = tuple(route["name"] for route in ROUTES)
    measures = (run.arm == "prompt" and (not args.tune or run.candidate == 0) for run in runs)
    return make_all([(run, routes if fixed else ()) for run, fixed in zip(runs, measures, strict=True)], args.jobs)


if __name__ == "__main__":
    main()
