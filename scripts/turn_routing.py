"""Routing at every turn against routing once per prompt, at equal cost: same actor, same questions, same rollouts.

    python scripts/turn_actor.py --out runs/turns/actor
    python scripts/turn_routing.py --out runs/turns --seeds 0 1 2 3 4
    python scripts/turn_routing.py --out runs/turns --seeds 0 1 2 3 4 --report

Arms: `prompt` has the three default routes, once per prompt; `prompt-both` a fourth one, with the tools of both
families; `turn` the same four, at every turn. Each arm and seed trains a head on the frozen actor, is calibrated to the
same budget, and answers the same fresh questions as `toolwise run` would. What is done is not repeated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from turn_actor import TOOLS, make_task

ARMS = ("turn", "prompt", "prompt-both")
BUDGET = 1.0
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""Student's t by number of seeds."""
BOTH = [
    {"name": "answer"},
    {"name": "search", "tools": ["search"]},
    {"name": "calculate", "tools": ["calculator"]},
    {"name": "both", "tools": ["search", "calculator"]},
]
EASY = 0.7
"""Share of two-step questions whose sum the model may know."""
TRAIN, CALIBRATION, FRESH = 1200, 128, 300


def rows(split: str, seed: int, count: int) -> list[dict[str, Any]]:
    rng = Random(f"turn routing/{split}/{seed}")
    return [
        make_task(rng, index, "train" if split == "train" else "heldout", easy_share=EASY) for index in range(count)
    ]


def settings(arm: str, seed: int, out: Path, steps: int) -> dict[str, Any]:
    router: dict[str, Any] = {
        "enable": True,
        "train_actor": False,
        "cost": "calls",
        "wording": "silent",
        "lr": 6e-3,
        "epochs": 4,
        "entropy_coef": 0.05,
        "entropy_final": 0.01,
        # λ stays: in so few steps it would only oscillate. The calibration delivers the budget.
        "budgets": [{"limit": BUDGET, "initial": 0.3, "rate": 0.0, "proportional": 0.0}],
        "calibration": CALIBRATION / TRAIN,
        # 512 rollouts for four routes, 384 for three, and at most 384 in passes over 64 tasks.
        "calibration_rollouts": CALIBRATION,
    }
    if arm == "turn":
        router |= {"every": "turn", "turn_mask": "decode", "calibration_passes": 6, "calibration_rollouts": 64}
    if arm != "prompt":
        router["routes"] = BOTH
    return {
        "name": f"{arm}-{seed}",
        "seed": seed,
        "model": {"path": str(out / "actor")},
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
        "trainer": {"total_steps": steps, "save_every": steps, "console": False},
    }


def train(arm: str, seed: int, out: Path, steps: int) -> Path:
    import toolwise

    run = out / f"{arm}-{seed}"
    if not (run / "summary.json").exists():
        toolwise.train(
            settings(arm, seed, out, steps),
            tasks=rows("train", seed, TRAIN),
            val=rows("validation", seed, 8),
            out=run,
        )
    return run


async def measure(run: Path, seed: int) -> list[dict[str, Any]]:
    """Score, cost and kind of each fresh question, answered as the agent answers by default."""
    import toolwise
    from toolwise.concurrency.deadlines import gather_all
    from toolwise.data.rows import tasks_from_rows
    from toolwise.demo.reward import small_world_reward

    agent = toolwise.load(run)
    tasks = tasks_from_rows(Path("fresh"), rows("fresh", 10_000 + seed, FRESH))
    answers = await gather_all(agent.aask(task) for task in tasks)
    measured = []
    for task, answer in zip(tasks, answers, strict=True):
        result = small_world_reward(list(answer.rollout.messages), task.ground_truth, price_per_call=0.0)
        measured.append(
            {"kind": task.extra_info["kind"], "easy": task.extra_info.get("easy"), "score": result.score}
            | {"cost": answer.cost, "route": answer.route}
        )
    return measured


def interval(values: Sequence[float]) -> str:
    """Mean and 95 % interval over seeds."""
    if len(values) < 2:
        return f"{fmean(values):.3f}"
    half = T_95.get(len(values), 2.0) * stdev(values) / len(values) ** 0.5
    return f"{fmean(values):.3f} ± {half:.3f}"


def report(out: Path, seeds: Sequence[int], arms: Sequence[str]) -> None:
    figures: dict[str, dict[str, list[float]]] = {}
    for arm in arms:
        figures[arm] = {name: [] for name in ("score", "cost", "two-step", "two-step cost", "others")}
        for seed in seeds:
            measured = json.loads((out / f"{arm}-{seed}" / "fresh.json").read_text())
            two_step = [row for row in measured if row["kind"] == "two_step"]
            others = [row for row in measured if row["kind"] != "two_step"]
            figures[arm]["score"].append(fmean(row["score"] for row in measured))
            figures[arm]["cost"].append(fmean(row["cost"] for row in measured))
            figures[arm]["two-step"].append(fmean(row["score"] for row in two_step))
            figures[arm]["two-step cost"].append(fmean(row["cost"] for row in two_step))
            figures[arm]["others"].append(fmean(row["score"] for row in others))
    print("| arm | cost | score | two-step score | two-step cost | other questions |\n|---|---|---|---|---|---|")
    for arm in arms:
        cells = (interval(figures[arm][name]) for name in ("cost", "score", "two-step", "two-step cost", "others"))
        print(f"| `{arm}` | {' | '.join(cells)} |")
    for arm in arms[1:]:
        gains = [
            interval([a - b for a, b in zip(figures[arms[0]][name], figures[arm][name], strict=True)])
            for name in ("score", "two-step", "cost")
        ]
        print(f"{arms[0]} − {arm}: score {gains[0]}, two-step {gains[1]}, cost {gains[2]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs, with the actor")
    parser.add_argument("--seeds", type=int, nargs="+", required=True, help="seeds")
    parser.add_argument("--arms", nargs="+", default=ARMS, choices=ARMS, help="which arms to run")
    parser.add_argument("--steps", type=int, default=20, help="training steps")
    parser.add_argument("--report", action="store_true", help="only print the table")
    args = parser.parse_args()
    if args.report:
        report(args.out, args.seeds, args.arms)
        return
    for seed in args.seeds:
        for arm in args.arms:
            run = train(arm, seed, args.out, args.steps)
            if not (run / "fresh.json").exists():
                measured = asyncio.run(measure(run, seed))
                (run / "fresh.json").write_text(json.dumps(measured))
            measured = json.loads((run / "fresh.json").read_text())
            means = (fmean(row[name] for row in measured) for name in ("score", "cost"))
            print(arm, seed, *(f"{mean:.3f}" for mean in means), flush=True)


if __name__ == "__main__":
    main()
