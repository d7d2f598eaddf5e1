"""The router of the demo against routers that no RL trains: the model's own confidence, the model asked for its tools,
and classifiers trained on labels.

    python scripts/untrained_routers.py --out runs/rivals           # the routers of scripts/rivals.py
    python scripts/untrained_routers.py --out runs/rivals --report

Rules, fixed before the test seeds were run: the candidates of each router are chosen by `toolwise eval` on its 256
tuning rows; then every router gets a threshold for each budget on other rows than those it is scored on, `ROWS` fresh
questions a seed. A router is measured by the share of the gap from random routes to the oracle that it closes at the
cost it really had. The intervals are Student's over seeds.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rivals import STUDENT_95, TEST_SEEDS, router_of, toolwise

ROWS, DRAWS = 600, 4
BUDGETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)


def frontier_of(out: Path, seed: int, jobs: int) -> dict[str, Any]:
    """Evaluate every router of one seed, unless that was done."""
    from toolwise.demo.recipe import ROUTABLE_KINDS
    from toolwise.demo.tasks import write_rows

    folder = out / "untrained" / f"seed-{seed}"
    if not (folder / "frontier" / "frontier.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        fresh = write_rows(folder / "fresh.jsonl", ROWS, seed=30_000 + seed, split="heldout", kinds=ROUTABLE_KINDS)
        words = ["eval", str(router_of(out, seed)), "--data", str(fresh), "--budgets", ",".join(map(str, BUDGETS))]
        toolwise(*words, "--draws", str(DRAWS), "--no-store", "--jobs", str(jobs), "--out", str(folder / "frontier"))
    return dict(json.loads((folder / "frontier" / "frontier.json").read_text(encoding="utf-8")))


def with_interval(values: Sequence[float]) -> str:
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return f"{finite[0]:.0%}" if finite else "–"
    half = STUDENT_95[len(finite)] * stdev(finite) / len(finite) ** 0.5
    return f"{fmean(finite):.0%} ± {100 * half:.0f}"


def report(frontiers: Sequence[dict[str, Any]]) -> None:
    routers = list(frontiers[0]["gap_closed"])
    for what, cell in (("gap closed", closed_by), ("score at cost", score_and_cost)):
        print(f"| {what}: budget | {' | '.join(routers)} |\n{'|---' * (len(routers) + 1)}|")
        for number, budget in enumerate(BUDGETS):
            print(f"| {budget} | {' | '.join(cell(frontiers, name, number) for name in routers)} |")
        print()
    for name in routers[1:]:
        leads = [fmean(closed_gaps(f, routers[0])) - fmean(closed_gaps(f, name)) for f in frontiers]
        print(f"- {routers[0]} less {name}, gap closed, mean over the budgets: {with_interval(leads)}")


def closed_gaps(frontier: dict[str, Any], name: str) -> list[float]:
    values = (each["value"] for each in frontier["gap_closed"][name])
    return [math.nan if value is None else value for value in values]  # there may be no gap


def closed_by(frontiers: Sequence[dict[str, Any]], name: str, number: int) -> str:
    return with_interval([closed_gaps(frontier, name)[number] for frontier in frontiers])


def score_and_cost(frontiers: Sequence[dict[str, Any]], name: str, number: int) -> str:
    points = [frontier["curves"][name][number] for frontier in frontiers]
    return f"{fmean(p['score']['value'] for p in points):.3f} at {fmean(p['cost']['value'] for p in points):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs of rivals.py")
    parser.add_argument("--seeds", type=int, nargs="+", default=TEST_SEEDS, help="test seeds")
    parser.add_argument("--jobs", type=int, default=1, help="processes that roll out")
    parser.add_argument("--report", action="store_true", help="only print the tables of the seeds done so far")
    args = parser.parse_args()
    stored = [args.out / "untrained" / f"seed-{seed}" / "frontier" / "frontier.json" for seed in args.seeds]
    seeds = [seed for seed, file in zip(args.seeds, stored, strict=True) if file.exists() or not args.report]
    if seeds:
        report([frontier_of(args.out, seed, args.jobs) for seed in seeds])


if __name__ == "__main__":
    main()
