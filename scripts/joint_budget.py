"""Does a joint budget of tools and thought hold in what is delivered? Teaches the small model, trains a router with one
seed, and measures it on fresh questions, routed as `toolwise run` routes them by default.

    python scripts/joint_budget.py --out runs/joint --teach             # the model and the tasks only: minutes
    for seed in 0 1 2; do python scripts/joint_budget.py --out runs/joint --seed $seed; done
    python scripts/joint_budget.py --out runs/joint --seed 0 --one-price
    python scripts/joint_budget.py --out runs/joint --seed 0 --random-budgets

The configuration is examples/joint_budget.toml; `--set` changes it. `--one-price` prices calls and thinking tokens in
one unit with one budget and one λ; `--random-budgets` draws that budget at random in training and measures several
that are given to the one policy. What is done is not repeated.

    routes   the head alone reads all fresh questions (one prefill each)
    costs    a sample of every (kind, length, chosen route) is rolled out, greedily as in validation; stratified mean
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts")]

from budget_holds import stratified  # noqa: E402

CONFIG = ROOT / "examples" / "joint_budget.toml"
TEACH = ("--steps", "450", "--batch-tokens", "4096", "--lr", "1e-3")
CONVERSATIONS = 24_000
ONE_PRICE = (
    "router.prices={cost={calculator=1.0,search=1.0,thinking_tokens=0.02}}",
    'router.budgets=[{unit="cost",limit=0.5,rate=0.3,proportional=0.5}]',
)
RANDOM_BUDGETS = "router.random_budgets={low=0.2,high=0.8,bins=4}"
GIVEN_BUDGETS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


def toolwise(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "toolwise", *arguments], check=True, stdout=subprocess.DEVNULL)


def teach(out: Path) -> None:
    """The model that writes levels and calls tools, and tasks of seed 0 for the example."""
    if (out / "taught" / "config.json").exists():
        return
    subprocess.run(
        [sys.executable, "-m", "toolwise.demo.thoughts", str(out), "--count", str(CONVERSATIONS)], check=True
    )
    toolwise("sft", str(out / "teach.jsonl"), "--model", "builtin:small", "--out", str(out / "taught"), *TEACH)


def train(seed: int, model: Path, run: Path, settings: Sequence[str]) -> None:
    from toolwise.data.files import write_rows
    from toolwise.demo.tasks import make_rows
    from toolwise.demo.thoughts import KINDS

    if (run / "summary.json").exists() and json.loads((run / "summary.json").read_text())["after"]:
        return
    for split, count in (("train", 10_000), ("heldout", 500)):
        rows = list(make_rows(count, seed=seed, split=split, kinds=KINDS))
        write_rows(rows, run.parent / f"{split}.jsonl")
    given = {
        "seed": str(seed),
        "model.path": str(model.resolve()),
        "data.train": str((run.parent / "train.jsonl").resolve()),
        "data.val": str((run.parent / "heldout.jsonl").resolve()),
    }
    options = [f"{name}={value}" for name, value in given.items()] + list(settings)
    toolwise("train", str(CONFIG), "--out", str(run), *(part for each in options for part in ("--set", each)))


async def roll_out(routing: Any, decisions: Sequence[Any]) -> list[tuple[float, ...]]:
    """(score, cost in each unit) of each decision, decoded greedily."""
    from toolwise.training.evaluate import build_scoring
    from toolwise.training.rollout_setup import build_scheduler

    scheduler = build_scheduler(routing.config, routing.policy, dict(routing.tools))
    scoring, outcomes = build_scoring(routing.config.reward), list[tuple[float, ...]]()
    try:
        for first in range(0, len(decisions), 256):
            rollouts = await scheduler.roll_out(decisions[first : first + 256], do_sample=False)
            for rollout, result in zip(rollouts, await scoring.evaluate(rollouts, step=0), strict=True):
                assert result.has_valid_score
                costs = routing.conditioning.costs_of(routing.cost, rollout)
                outcomes.append((result.score, *(costs[unit] for unit in routing.trained.units)))
        return outcomes
    finally:
        scoring.close()


def measure(seed: int, run: Path, rows: int, per_cell: int, budgets: Sequence[float | None]) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    from toolwise.agent.loader import load_router
    from toolwise.data import load_tasks
    from toolwise.data.files import write_rows
    from toolwise.demo.tasks import make_rows
    from toolwise.demo.thoughts import KINDS

    routing = load_router(run)
    assert routing.trained is not None, "the checkpoint is not calibrated"
    fresh = run.parent / "fresh.jsonl"
    write_rows(list(make_rows(rows, seed=10_000 + seed, split="heldout", kinds=KINDS)), fresh)
    tasks = load_tasks(fresh)
    predictions = routing.predict(tasks)
    measured = [_measure_budget(routing, tasks, predictions, budget, seed, per_cell) for budget in budgets]
    return {"seed": seed, "rows": rows, "measured": measured}


def _measure_budget(
    routing: Any, tasks: Sequence[Any], predictions: Sequence[Any], budget: float | None, seed: int, per_cell: int
) -> dict[str, Any]:
    """What is delivered at a budget in the first unit; None: at the trained budgets."""
    members: dict[Any, list[Any]] = defaultdict(list)
    for prediction, task in zip(predictions, tasks, strict=True):
        route = routing.choose(prediction, task, budget=budget, seed=0)
        length = str(task.prompt[0].content).count("+")
        members[task.extra_info["kind"], length, route].append(task)
    picked = [
        (cell, task)
        for cell, those in sorted(members.items())
        for task in Random(seed).sample(those, min(per_cell, len(those)))
    ]
    limits = list(routing.trained.limits) if budget is None else [budget, *routing.trained.limits[1:]]
    outcomes = asyncio.run(roll_out(routing, [routing.decide(task, cell[2]) for cell, task in picked]))
    cells: dict[Any, list[tuple[float, ...]]] = defaultdict(list)
    for (cell, _), (score, *costs) in zip(picked, outcomes, strict=True):
        within = [float(cost <= limit) for cost, limit in zip(costs, limits, strict=True)]
        cells[cell].append((score, *costs, *within))
    score, *estimates = stratified(cells, {cell: len(those) for cell, those in members.items()})
    count = len(limits)
    return {
        "score": score,
        "rollouts": len(picked),
        "units": {
            unit: {"budget": limit, "delivered": mean, "standard_error": error, "within": within}
            for unit, limit, (mean, error), (within, _) in zip(
                routing.trained.units, limits, estimates[:count], estimates[count:], strict=True
            )
        },
        "routes": {"/".join(map(str, cell)): len(those) for cell, those in sorted(members.items())},
        "scores": {"/".join(map(str, c)): sum(o[0] for o in those) / len(those) for c, those in sorted(cells.items())},
    }


def report(out: Path) -> None:
    columns = ("run", "unit", "budget", "delivered", "standard error", "off by", "episodes within", "score")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for path in sorted(out.glob("*/joint.json")):
        for measured in json.loads(path.read_text())["measured"]:
            for unit, u in measured["units"].items():
                cells = [path.parent.name, unit, f"{u['budget']:g}", f"{u['delivered']:.3f}"]
                cells += [f"{u['standard_error']:.3f}", f"{u['delivered'] / u['budget'] - 1:+.1%}"]
                cells += [f"{u['within']:.0%}", f"{measured['score'][0]:.3f}"]
                print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the experiment")
    parser.add_argument("--seed", type=int, default=0, help="seed of the tasks and of training")
    parser.add_argument("--teach", action="store_true", help="only make the model and the example's tasks")
    parser.add_argument("--model", type=Path, help="a model that was taught before; by default OUT/taught")
    parser.add_argument("--one-price", action="store_true", help="one unit for calls and thought")
    parser.add_argument("--random-budgets", action="store_true", help="the same, with budgets drawn at random")
    parser.add_argument("--set", action="append", default=[], help="a setting of the configuration")
    parser.add_argument("--rows", type=int, default=12_000, help="fresh questions to route")
    parser.add_argument("--per-cell", type=int, default=40, help="rollouts of every (kind, length, chosen route)")
    parser.add_argument("--report", action="store_true", help="only print the table of the seeds measured so far")
    args = parser.parse_args()
    if not args.report and args.model is None:
        teach(args.out)
    if not args.report and not args.teach:
        kind = "random-budgets" if args.random_budgets else "one-price" if args.one_price else "joint"
        folder = args.out / f"{kind}-{args.seed}"
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "joint.json").exists():
            settings = {"joint": (), "one-price": ONE_PRICE, "random-budgets": (*ONE_PRICE, RANDOM_BUDGETS)}[kind]
            train(args.seed, args.model or args.out / "taught", folder / "run", [*settings, *args.set])
            budgets = GIVEN_BUDGETS if args.random_budgets else (None,)
            measured = measure(args.seed, folder / "run", args.rows, args.per_cell, budgets)
            (folder / "joint.json").write_text(json.dumps(measured, indent=1) + "\n")
    if not args.teach:
        report(args.out)


if __name__ == "__main__":
    main()
