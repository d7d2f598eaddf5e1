"""Does the budget hold in what is delivered? Trains the demo with one seed and measures its last checkpoint on fresh
questions, routed as `toolwise run` and `toolwise eval` route them by default.

    for seed in 0 1 2 3 4; do python scripts/budget_holds.py --out runs/holds --seed $seed; done
    python scripts/budget_holds.py --out runs/holds --report
    python scripts/budget_holds.py --out runs/holds --router runs/router      # runs of scripts/router_experiment.py

Unknown options are passed to `toolwise demo`. What is done is not repeated: the run, then its measurement.

    routes   the head alone reads all fresh questions (one prefill each)
    costs    a sample of every (kind, chosen route) is rolled out, greedily as in validation; stratified mean
    oracle   a sample of the questions, with the kinds in proportion, is rolled out under every route: the best score at
             the delivered cost if the outcome of every route were known beforehand
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

COLUMNS = (
    *("seed", "budget", "delivered", "standard error", "beyond", "allowed", "score", "oracle", "of the oracle"),
    *("calibration rows", "its standard error", "sampled routes", "holds"),
)
TOLERANCE, SHARE_OF_ORACLE = 0.05, 0.97


def train(seed: int, run: Path, more: Sequence[str]) -> None:
    if (run / "summary.json").exists() and json.loads((run / "summary.json").read_text())["after"]:
        return
    command = [sys.executable, "-m", "toolwise", "demo", "--no-frontier", "--seed", str(seed), "--out", str(run), *more]
    resumed = ["--resume"] if (run / "checkpoints").exists() else []
    subprocess.run([*command, *resumed], check=True, stdout=subprocess.DEVNULL)


def fresh_tasks(folder: Path, seed: int, rows: int) -> list[Any]:
    """Questions of the demo's kinds, generated with a seed that no run uses."""
    from toolwise.data import load_tasks
    from toolwise.demo.recipe import ROUTABLE_KINDS
    from toolwise.demo.tasks import write_rows

    return load_tasks(
        write_rows(folder / "fresh.jsonl", rows, seed=10_000 + seed, split="heldout", kinds=ROUTABLE_KINDS)
    )


async def roll_out(routing: Any, decisions: Sequence[Any]) -> list[tuple[float, float]]:
    """(score, cost) of each decision, decoded greedily; rollouts without a valid score are an error."""
    from toolwise.training.evaluate import build_scoring
    from toolwise.training.rollout_setup import build_scheduler

    scheduler = build_scheduler(routing.config, routing.policy, dict(routing.tools))
    scoring = build_scoring(routing.config.reward)
    try:
        outcomes = []
        for first in range(0, len(decisions), 256):
            rollouts = await scheduler.roll_out(decisions[first : first + 256], do_sample=False)
            results = await scoring.evaluate(rollouts, step=0)
            assert all(result.has_valid_score for result in results)
            costs = [routing.cost_of(rollout) for rollout in rollouts]
            outcomes += [(result.score, cost) for result, cost in zip(results, costs, strict=True)]
        return outcomes
    finally:
        scoring.close()


def stratified(cells: dict[Any, list[tuple[float, ...]]], sizes: Mapping[Any, float]) -> list[tuple[float, float]]:
    """(mean, standard error) of score and costs over all rows, from a sample of each cell."""
    import numpy as np

    total, estimates = sum(sizes.values()), []
    for index in range(len(next(iter(cells.values()))[0])):
        weights = np.array([sizes[cell] / total for cell in cells])
        means = np.array([np.mean([outcome[index] for outcome in cells[cell]]) for cell in cells])
        variances = np.array(
            [np.var([o[index] for o in cells[cell]], ddof=int(len(cells[cell]) > 1)) for cell in cells]
        )
        counts = np.array([len(cells[cell]) for cell in cells])
        mean = float(weights @ means)
        within = float((weights**2 * variances / counts).sum())
        between = float(weights @ (means**2 + variances) - mean**2) / total
        estimates.append((mean, math.sqrt(within + between)))
    return estimates


def measure(seed: int, run: Path, rows: int, per_cell: int, oracle_rows: int) -> dict[str, Any]:
    import numpy as np
    import torch

    torch.set_num_threads(1)
    from toolwise.agent.loader import load_router
    from toolwise.frontier.reference_curves import estimate, oracle_curve, row_weights
    from toolwise.routing.families import ROUTES

    routing = load_router(run)
    trained = routing.trained
    assert trained is not None, "the checkpoint is not calibrated"
    tasks = fresh_tasks(run.parent, seed, rows)
    predictions = routing.predict(tasks)
    chosen = [routing.choose(p, task, budget=None, seed=0) for p, task in zip(predictions, tasks, strict=True)]
    members: dict[Any, list[Any]] = defaultdict(list)
    for task, route in zip(tasks, chosen, strict=True):
        members[task.extra_info["kind"], route].append(task)
    picked = [
        (cell, task)
        for cell, those in sorted(members.items())
        for task in Random(seed).sample(those, min(per_cell, len(those)))
    ]
    outcomes = asyncio.run(roll_out(routing, [routing.decide(task, cell[1]) for cell, task in picked]))
    cells: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for (cell, _), outcome in zip(picked, outcomes, strict=True):
        cells[cell].append(outcome)
    (score, score_error), (cost, cost_error) = stratified(cells, {cell: len(those) for cell, those in members.items()})
    by_kind: dict[str, list[Any]] = defaultdict(list)
    for task in tasks:
        by_kind[task.extra_info["kind"]].append(task)
    sample = [task for those in by_kind.values() for task in those[: round(oracle_rows * len(those) / len(tasks))]]
    table = np.array(asyncio.run(roll_out(routing, [routing.decide(t, route) for t in sample for route in ROUTES])))
    table = table.reshape(len(sample), len(ROUTES), 2)
    weights = row_weights(len(sample), 1000, seed)
    curve = oracle_curve(table[:, :, 0], table[:, :, 1], weights)
    oracle = estimate(curve.score_at(np.full(len(weights), cost)))
    probabilities = np.array([p.probs for p in routing.predict(sample)])
    (limit,) = trained.limits
    allowed = TOLERANCE * limit + 2 * cost_error
    return {
        "seed": seed,
        "budget": limit,
        "rows": rows,
        "rollouts": len(picked),
        "delivered": cost,
        "standard_error": cost_error,
        "beyond": cost - limit,
        "allowed": allowed,
        "score": score,
        "score_standard_error": score_error,
        "oracle": oracle.value,
        "oracle_interval": [oracle.low, oracle.high],
        "share_of_oracle": score / oracle.value,
        "calibration_rows": trained.rows,
        "calibration_standard_error": trained.standard_errors[0],
        "sampled_routes": float((probabilities * table[:, :, 1]).sum(axis=1).mean()),
        "routes": {f"{kind}/{route}": len(those) for (kind, route), those in sorted(members.items())},
        "holds": bool(abs(cost - limit) <= allowed and score >= SHARE_OF_ORACLE * oracle.value),
    }


def report(out: Path) -> None:
    print(f"| {' | '.join(COLUMNS)} |")
    print("|---" * len(COLUMNS) + "|")
    for path in sorted(out.glob("seed-*/holds.json")):
        r = json.loads(path.read_text())
        cells = [
            *(str(r["seed"]), f"{r['budget']:g}", f"{r['delivered']:.3f}", f"{r['standard_error']:.3f}"),
            *(f"{r['beyond']:+.3f}", f"±{r['allowed']:.3f}", f"{r['score']:.3f}", f"{r['oracle']:.3f}"),
            *(f"{r['share_of_oracle']:.1%}", str(r["calibration_rows"]), f"{r['calibration_standard_error']:.3f}"),
            *(f"{r['sampled_routes']:.3f}", "yes" if r["holds"] else "no"),
        ]
        print(f"| {' | '.join(cells)} |")


def report_router(experiment: Path) -> None:
    """The runs of the router experiment under their calibrated thresholds: fresh questions as each run routes them,
    with the outcomes of the held-out pool of every (kind, route); the oracle's score is that of the pool."""
    import numpy as np

    sys.path.insert(0, str(Path(__file__).parent))
    from router_report import ALLOWED, outcomes_of

    from toolwise.data import load_tasks
    from toolwise.frontier.reference_curves import oracle_curve

    outcomes = outcomes_of(experiment, {"calculator": 1.0, "search": 1.0})
    curve = oracle_curve(
        *map(outcomes.mean_over_draws, ("scores", "costs")),
        np.full((1, len(outcomes.row_ids)), 1 / len(outcomes.row_ids)),
    )
    kind_of = {task.task_id: task.extra_info["kind"] for task in load_tasks(experiment / "tasks" / "heldout.jsonl")}
    cells: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for i, row in enumerate(outcomes.row_ids):
        for j, route in enumerate(ALLOWED):
            cells[kind_of[row], route] += zip(outcomes.scores[i, j], outcomes.costs[i, j], strict=True)
    fresh = load_tasks(experiment / "tasks" / "fresh.jsonl")
    columns = ("run", "budget", "delivered", "standard error", "beyond", "allowed", "score", "oracle", "of the oracle")
    print(f"| {' | '.join((*columns, 'holds'))} |\n{'|---' * (len(columns) + 1)}|")
    for path in sorted((experiment / "runs").glob("budget-*.jsonl")):
        last = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
        sizes: dict[Any, float] = dict.fromkeys(cells, 0.0)
        for task, probabilities in zip(fresh, last["delivered"], strict=True):
            for route, share in zip(ALLOWED, probabilities, strict=True):
                sizes[task.extra_info["kind"], route] += share
        (score, _), (cost, error) = stratified(cells, sizes)
        (limit,) = last["calibration"]["limits"]
        oracle, allowed = float(curve.score_at(np.array([cost]))[0]), TOLERANCE * limit + 2 * error
        holds = abs(cost - limit) <= allowed and score >= SHARE_OF_ORACLE * oracle
        line = [f"{limit:g}", f"{cost:.3f}", f"{error:.3f}", f"{cost - limit:+.3f}", f"±{allowed:.3f}"]
        line += [f"{score:.3f}", f"{oracle:.3f}", f"{score / oracle:.1%}", "yes" if holds else "no"]
        print(f"| {path.stem} | {' | '.join(line)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the experiment")
    parser.add_argument("--seed", type=int, default=0, help="seed of the tasks and of training")
    parser.add_argument("--rows", type=int, default=12_000, help="fresh questions to route")
    parser.add_argument("--per-cell", type=int, default=150, help="rollouts of every (kind, chosen route)")
    parser.add_argument("--oracle-rows", type=int, default=500, help="questions rolled out under every route")
    parser.add_argument("--report", action="store_true", help="only print the table of the seeds measured so far")
    parser.add_argument("--router", type=Path, help="only print the table of this folder of router_experiment.py")
    args, more = parser.parse_known_args()
    if args.router is not None:
        report_router(args.router)
        return
    if not args.report:
        folder = args.out / f"seed-{args.seed}"
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "holds.json").exists():
            train(args.seed, folder / "run", more)
            measured = measure(args.seed, folder / "run", args.rows, args.per_cell, args.oracle_rows)
            (folder / "holds.json").write_text(json.dumps(measured, indent=1) + "\n")
    report(args.out)


if __name__ == "__main__":
    main()
