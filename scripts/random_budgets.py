"""One policy for all budgets against one policy for each: what they deliver, and what they score for it.

    python scripts/random_budgets.py --out runs/budgets --teach
    for arm in random capped told 0.2 0.5 0.8; do
      python scripts/random_budgets.py --out runs/budgets --arm $arm --seed 0; done
    python scripts/random_budgets.py --out runs/budgets --report

Every arm is a run of the demo, actor and router, with the same number of steps. `random` draws a budget for each prompt
(`router.random_budgets`) and then serves each of `BUDGETS`, two of them between those that it was trained for. `capped`
has a cap of one call per episode besides (`max_cost`), and `told` a line about budget and cap in its prompts and after
results (`budget_prompt`). A number is a run with that one budget. All answer the same fresh questions as `toolwise run
--budget B` does, greedily. What is done is not repeated.

The model that ships has never read a line about a budget, and writes calls that cannot be read after one. So `--teach`
shows it some, in conversations of the demo's teacher that take no notice of them; every arm starts from that model.
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
from statistics import fmean, stdev
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from budget_holds import fresh_tasks

BUDGETS = (0.2, 0.35, 0.5, 0.65, 0.8)
CAP = 1.0
RANDOM = "router.random_budgets={low=0.2,high=0.8,bins=4}"
FRESH, PART = 900, 150


def overrides(arm: str) -> list[str]:
    if arm == "random":
        return [RANDOM]
    if arm in ("capped", "told"):
        return [RANDOM, f"router.budget_prompt={str(arm == 'told').lower()}", f"router.max_cost={CAP}"]
    return [f"router.budgets=[{{limit={float(arm)},rate=0.3,proportional=0.5}}]"]


def teach(model: Path, rows: int = 4000, steps: int = 120) -> None:
    """The model that ships, after conversations with lines about budgets."""
    from random import Random

    import small_world_teacher

    import toolwise
    from toolwise.config.router import RouterConfig
    from toolwise.routing.budget_prompt import BudgetPrompt

    if (model / "config.json").exists():
        return
    rng, prompt = Random("budget lines"), BudgetPrompt(RouterConfig.model_validate({"budgets": [{"limit": 0.5}]}))
    conversations = small_world_teacher.conversations(rows, seed=1)
    for conversation in conversations[: rows // 2]:
        budget, cap, calls = rng.randint(4, 16) / 20, rng.choice([None, CAP]), 0
        for message in conversation["messages"]:
            line = prompt.line(budget, cap) if message["role"] == "user" else ""
            if message["role"] == "tool":
                calls += 1
                line = prompt.left(budget, cap, 0.0, float(calls))
            # As `append_line` and `CappedEnv` write them.
            gap = "\n\n" if message["role"] == "user" else "\n"
            message["content"] = f"{message['content']}{gap}{line}" if line else message["content"]
    rng.shuffle(conversations)
    partial = model.with_name(f".{model.name}.tmp")
    toolwise.sft("builtin:small", conversations, partial, steps=steps, batch_tokens=4096, row_tokens=512, lr=5e-4)
    partial.rename(model)


def train(arm: str, seed: int, run: Path, model: Path, more: Sequence[str]) -> None:
    if (run / "summary.json").exists() and json.loads((run / "summary.json").read_text())["after"]:
        return
    settings = [
        *overrides(arm),
        f"model.path={model.resolve()}",
        "validation.every=0",
        'reward.sandbox.trusted=["toolwise.demo.reward"]',
        *more,
    ]
    words = ["demo", "--no-frontier", "--seed", str(seed), "--out", str(run)]
    words += [word for setting in settings for word in ("--set", setting)]
    subprocess.run([sys.executable, "-m", "toolwise", *words], check=True, stdout=subprocess.DEVNULL)


async def measure(run: Path, seed: int, budgets: Sequence[float]) -> list[dict[str, Any]]:
    """Score and cost of every fresh question at each budget."""
    import toolwise
    from toolwise.concurrency.deadlines import gather_all
    from toolwise.demo.reward import small_world_reward

    agent, tasks = toolwise.load(run), fresh_tasks(run, seed, FRESH)
    measured = []
    for budget in budgets:
        outcomes = []
        for first in range(0, len(tasks), PART):
            part = tasks[first : first + PART]
            answers = await gather_all(agent.aask(task, budget=budget) for task in part)
            for task, answer in zip(part, answers, strict=True):
                result = small_world_reward(list(answer.rollout.messages), task.ground_truth, price_per_call=0.0)
                outcomes.append((result.score or 0.0, answer.cost))
        measured.append({"budget": budget, "outcomes": outcomes})
    return measured


def report(out: Path) -> None:
    columns = ("arm", "budget", "seeds", "delivered, by seed", "score, by seed", "mean score")
    columns += ("episodes within the budget", f"within {CAP:g}")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    rows: dict[tuple[str, float], list[Any]] = defaultdict(list)
    for path in sorted(out.glob("*/budgets.json")):
        arm = path.parent.name.rpartition("-")[0]
        for each in json.loads(path.read_text()):
            rows["separate" if arm[0].isdigit() else arm, each["budget"]].append(each["outcomes"])
    for (arm, budget), seeds in sorted(rows.items(), key=lambda item: (item[0][1], item[0][0])):
        costs = [fmean(cost for _, cost in outcomes) for outcomes in seeds]
        scores = [fmean(score for score, _ in outcomes) for outcomes in seeds]
        error = stdev(cost for _, cost in seeds[0]) / len(seeds[0]) ** 0.5
        within = [fmean(cost <= most + 1e-9 for outcomes in seeds for _, cost in outcomes) for most in (budget, CAP)]
        cells = [arm, f"{budget:g}", str(len(seeds)), " ".join(f"{c:.3f}" for c in costs) + f" (se {error:.3f})"]
        cells += [" ".join(f"{s:.3f}" for s in scores), f"{fmean(scores):.3f}", *(f"{share:.1%}" for share in within)]
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--arm", default="random", help="random, capped, told, or a budget")
    parser.add_argument("--seed", type=int, default=0, help="seed")
    parser.add_argument("--set", action="append", default=[], help="a setting of the demo")
    parser.add_argument("--teach", action="store_true", help="only make the model")
    parser.add_argument("--model", type=Path, help="the model; by default OUT/model")
    parser.add_argument("--report", action="store_true", help="only print the table")
    args = parser.parse_args()
    if args.report:
        report(args.out)
        return
    teach(model := args.model or args.out / "model")
    if args.teach:
        return
    run = args.out / f"{args.arm}-{args.seed}"
    train(args.arm, args.seed, run, model, args.set)
    if not (run / "budgets.json").exists():
        budgets = BUDGETS if args.arm in ("random", "capped", "told") else (float(args.arm),)
        (run / "budgets.json").write_text(json.dumps(asyncio.run(measure(run, args.seed, budgets))))
    for each in json.loads((run / "budgets.json").read_text()):
        score, cost = (fmean(values) for values in zip(*each["outcomes"], strict=True))
        print(f"{args.arm}, seed {args.seed}, budget {each['budget']:g}: cost {cost:.3f}, score {score:.3f}")


if __name__ == "__main__":
    main()
