"""The router of the demo against actors that are trained to spend less without a router: OTC, HDPO and ranks by Pareto
dominance, the second stage of ParetoPO.

    python scripts/rivals.py --out runs/rivals --tune         # seeds 100 and 101: every setting of every rival
    python scripts/rivals.py --out runs/rivals                # seeds 0 to 4: the chosen settings, and the table
    python scripts/rivals.py --out runs/rivals --report

`--jobs 16` trains as many at a time, for a machine with as many cores.

Rules, fixed before the test seeds were run:

- World, model, tasks, batch size, steps, learning rate and price of invalid actions are the demo's. A rival sees all
  tools and has no router, so a group is nine rollouts of one question.
- Each rival has three settings (`RIVALS`), of the option that its paper leaves open; ParetoPO has none and gets three
  learning rates. The demo's own settings came from four runs that were looked at (docs/results.md).
- An actor without a router ends at one cost. It is compared at that cost: the router, routed for it by thresholds that
  are fitted on other rows (`toolwise eval --baseline`), less the rival, on the same fresh questions.
- The setting of a rival is the one with the smallest mean lead of the router over it on the tuning seeds: the best for
  the rival. Where it costs more than the router can spend, the router just spends less.
- The test: seeds 0 to 4, one run of the router and of each rival per seed, `ROWS` questions that no run has seen. The
  interval is Student's over the five leads.

What is done is not repeated: every training and every evaluation has its own folder.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

TUNING_SEEDS, TEST_SEEDS = (100, 101), (0, 1, 2, 3, 4)
ROWS, DRAWS = 400, 4
STUDENT_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Quantiles of Student's distribution, by the number of seeds."""
_OTC = (
    "reward.function=toolwise.rewards.library.otc:otc_reward",
    'reward.kwargs={{correct="toolwise.demo.reward:small_world_reward",correct_kwargs={{price_per_call=0.0}},'
    "smoothing={}}}",
)
RIVALS: dict[str, dict[str, tuple[str, ...]]] = {
    "OTC": {f"smoothing-{c}": (_OTC[0], _OTC[1].format(c)) for c in ("0.3", "1.0", "3.0")},
    "HDPO": {
        f"w-{w}": ("algorithm.adv_estimator=hdpo", f"algorithm.efficiency_w={w}") for w in ("0.05", "0.15", "0.5")
    },
    "ParetoPO": {
        f"lr-{lr}": ("algorithm.adv_estimator=pareto", f"actor.lr={lr}") for lr in ("0.00005", "0.0001", "0.0002")
    },
}
"""rival -> setting -> what is different from the demo, besides that there is no router."""


def toolwise(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "toolwise", *words], check=True, stdout=subprocess.DEVNULL)


def finished(run: Path) -> bool:
    file = run / "summary.json"
    return file.exists() and bool(json.loads(file.read_text())["after"])


def router_of(out: Path, seed: int) -> Path:
    run = out / f"router-{seed}"
    if not finished(run):
        resumed = ["--resume"] if (run / "checkpoints").exists() else []
        toolwise("demo", "--no-frontier", "--seed", str(seed), "--out", str(run), *resumed)
    return run


def rival_of(out: Path, router: Path, rival: str, setting: str, seed: int) -> Path:
    run = out / f"{rival}-{setting}-{seed}"
    if not finished(run):
        different = ["router.enable=false", "validation.every=0", *RIVALS[rival][setting]]
        resumed = ["--resume"] if (run / "checkpoints").exists() else []
        sets = [word for each in different for word in ("--set", each)]
        toolwise("train", str(router / "config.toml"), "--out", str(run), *sets, *resumed)
    return run


def train_all(out: Path, seeds: Sequence[int], settings: Mapping[str, Sequence[str]], jobs: int) -> None:
    """Train what is missing, `jobs` runs at a time: the routers first, since the rivals read their tasks."""
    cases = [(rival, setting, seed) for seed in seeds for rival, each in settings.items() for setting in each]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda seed: router_of(out, seed), seeds))
        list(pool.map(lambda case: rival_of(out, out / f"router-{case[2]}", *case), cases))


def compare(out: Path, part: str, seed: int, settings: Mapping[str, Sequence[str]], jobs: int = 1) -> dict[str, Any]:
    """Train what is missing for one seed and evaluate it; rival-setting -> its point, and the router at its cost."""
    from toolwise.demo.recipe import ROUTABLE_KINDS
    from toolwise.demo.tasks import write_rows

    names = "+".join(f"{rival}-{s}" for rival, each in settings.items() for s in each)
    folder = out / part / f"seed-{seed}"
    stored = folder / "compared.json"
    if stored.exists() and (known := json.loads(stored.read_text()))["names"] == names:
        return dict(known["compared"])
    router = router_of(out, seed)
    runs = {f"{r}-{s}": rival_of(out, router, r, s, seed) for r, each in settings.items() for s in each}
    folder.mkdir(parents=True, exist_ok=True)
    fresh = write_rows(folder / "fresh.jsonl", ROWS, seed=20_000 + seed, split="heldout", kinds=ROUTABLE_KINDS)
    words = ["eval", str(router), "--data", str(fresh), "--budgets", "0.5", "--draws", str(DRAWS), "--no-store"]
    words += ["--tuning-rows", "0", "--jobs", str(jobs), "--out", str(folder / "frontier")]
    words += [word for name, run in runs.items() for word in ("--baseline", f"{name}={run}")]
    toolwise(*words)
    frontier = json.loads((folder / "frontier" / "frontier.json").read_text())
    compared = {name: {**frontier["fixed"][name], "router": frontier["against_fixed"][name]} for name in runs}
    stored.write_text(json.dumps({"names": names, "compared": compared}, indent=1) + "\n")
    return compared


def choose(out: Path, tuning: Sequence[int] = TUNING_SEEDS, jobs: int = 1) -> dict[str, str]:
    """The setting of each rival with the smallest mean lead of the router on the tuning seeds."""
    every = {rival: tuple(settings) for rival, settings in RIVALS.items()}
    train_all(out, tuning, every, jobs)
    seeds = [compare(out, "tuning", seed, every, jobs) for seed in tuning]
    chosen = {}
    print("| rival | setting | score | cost | router ahead by |\n|---|---|---|---|---|")
    for rival, settings in every.items():
        leads = {}
        for setting in settings:
            points = [seed[f"{rival}-{setting}"] for seed in seeds]
            leads[setting] = fmean(point["router"]["ahead"]["value"] for point in points)
            score, cost = (fmean(point[what]["value"] for point in points) for what in ("score", "cost"))
            print(f"| {rival} | {setting} | {score:.3f} | {cost:.3f} | {leads[setting]:+.3f} |")
        chosen[rival] = min(leads, key=leads.__getitem__)
    (out / "chosen.json").write_text(json.dumps(chosen, indent=1) + "\n")
    return chosen


def report(compared: Mapping[int, Mapping[str, Any]], chosen: Mapping[str, str]) -> None:
    """One row per rival: its points by seed, the router at its cost, and the mean lead with its interval."""
    columns = ("rival", "setting", "cost, by seed", "score, by seed", "router at that cost", "router ahead by")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for rival, setting in chosen.items():
        points = [seed[f"{rival}-{setting}"] for seed in compared.values()]
        leads = [point["router"]["ahead"]["value"] for point in points]
        half = STUDENT_95[len(leads)] * stdev(leads) / len(leads) ** 0.5 if len(leads) > 1 else float("nan")
        cells = [rival, setting]
        cells += [" ".join(f"{point[what]['value']:.3f}" for point in points) for what in ("cost", "score")]
        cells += [" ".join(f"{p['router']['score']['value']:.3f} ({p['router']['cost']['value']:.3f})" for p in points)]
        cells += [f"{fmean(leads):+.3f} [{fmean(leads) - half:+.3f} {fmean(leads) + half:+.3f}]"]
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--tune", action="store_true", help="only choose the settings, on the tuning seeds")
    parser.add_argument("--tuning-seeds", type=int, nargs="+", default=TUNING_SEEDS, help="tuning seeds")
    parser.add_argument("--jobs", type=int, default=1, help="runs trained at a time")
    parser.add_argument("--seeds", type=int, nargs="+", default=TEST_SEEDS, help="test seeds")
    parser.add_argument("--report", action="store_true", help="only print the table of the test seeds done so far")
    args = parser.parse_args()
    if both := {*args.tuning_seeds} & {*args.seeds}:
        parser.error(f"seeds {both} are to be tuned on and tested on")
    chosen = json.loads((args.out / "chosen.json").read_text()) if (args.out / "chosen.json").exists() else None
    if chosen is None or args.tune:
        chosen = choose(args.out, args.tuning_seeds, args.jobs)
    if args.tune:
        return
    settings, compared = {rival: (setting,) for rival, setting in chosen.items()}, {}
    if not args.report:
        train_all(args.out, args.seeds, settings, args.jobs)
    for seed in args.seeds:
        if not args.report or (args.out / "test" / f"seed-{seed}" / "compared.json").exists():
            compared[seed] = compare(args.out, "test", seed, settings, args.jobs)
    report(compared, chosen)


if __name__ == "__main__":
    main()
