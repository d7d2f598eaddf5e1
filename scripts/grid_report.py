"""Report of `scripts/grid_gigpo.py`: tables for docs/results.md (on stdout), the numbers as JSON, and the curves.

python scripts/grid_report.py --records runs/grid.jsonl --picture docs/images/grid_gigpo.png --json figures.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean, median
from typing import Any

from grid_gigpo import (
    KL_TARGET,
    LONGER,
    OTHER_SEEDS,
    PAIRED_SEEDS,
    RATES,
    ROLLOUTS,
    STEPS,
    TASKS,
    TUNING_SEEDS,
    WANTED,
    Record,
    best_rates,
    mean_rollouts,
    read_records,
)

FEWER = 0.2
WHOLE = STEPS * TASKS * ROLLOUTS
LAST = LONGER // 3
"""Final steps over which KL is averaged."""


def pair_of(records: dict[str, Record], seed: int) -> dict[str, Any]:
    """The numbers of one seed. If GRPO never reached the target it is assumed to do so right after the run, a lower
    bound; if GiGPO never did, it has lost."""
    grpo, gigpo = (records[f"paired-{name}-{seed}"] for name in ("grpo", "gigpo"))
    saved = None if gigpo.reached is None else 1.0 - gigpo.reached / (grpo.reached or WHOLE)
    return {
        "seed": seed,
        "grpo": grpo.reached,
        "gigpo": gigpo.reached,
        "saved": saved,
        "fewer": saved is not None and saved >= FEWER,
        "begins": grpo.lines[0]["chance"],
        "held_out": {"grpo": grpo.lines[-1]["held_out"], "gigpo": gigpo.lines[-1]["held_out"]},
        "singletons": mean(line["gigpo/frac_singleton"] for line in gigpo.lines if "gigpo/frac_singleton" in line),
    }


def figures(records: dict[str, Record]) -> dict[str, Any]:
    pairs = [pair_of(records, seed) for seed in PAIRED_SEEDS]
    return {
        "best": best_rates(records),
        "sweep": {f"{lr:g}": {e: mean_rollouts(records, e, lr) for e in ("grpo", "gigpo")} for lr in RATES},
        "pairs": pairs,
        "seeds_with_fewer": sum(pair["fewer"] for pair in pairs),
        "median": {e: median(pair[e] or WHOLE for pair in pairs) for e in ("grpo", "gigpo")},
        "median_saved": median(pair["saved"] if pair["saved"] is not None else -1.0 for pair in pairs),
        "ppo": [ppo_of(records[f"ppo-{seed}"]) for seed in OTHER_SEEDS],
        "kl": [kl_of(r) for name, r in sorted(records.items()) if r.job.kind == "kl"],
    }


def ppo_of(record: Record) -> dict[str, Any]:
    first, last = record.lines[0], record.lines[-1]
    return {
        "seed": record.job.seed,
        "reached": record.reached,
        "before": first["chance"],
        "after": last["chance"],
        "held_out": last["held_out"],
        "explained_variance": mean(line.get("critic/explained_variance", 0.0) for line in record.lines[-LAST:]),
    }


def kl_of(record: Record) -> dict[str, Any]:
    steps = [line for line in record.lines if "kl/reference" in line]
    return {
        "where": record.job.name.split("-")[1],
        "seed": record.job.seed,
        "kl": mean(line["kl/reference"] for line in steps[-LAST:]),
        "most": max(line["kl/reference"] for line in steps[-LAST:]),
        "coef": steps[-1]["kl/coef"],
        "after": record.lines[-1]["chance"],
    }


def section(found: dict[str, Any]) -> str:
    """The tables as Markdown; every number is taken from `found`."""
    best, pairs = found["best"], found["pairs"]
    lines = [
        "| learning rate | " + " | ".join(f"{lr:g}" for lr in RATES) + " |",
        "|---|" + "---|" * len(RATES),
        *(
            f"| {name} | " + " | ".join(f"{found['sweep'][f'{lr:g}'][e]:,.0f}" for lr in RATES) + " |"
            for e, name in (("grpo", "GRPO"), ("gigpo", "GiGPO"))
        ),
        "",
        f"Rollouts to {WANTED:.0%} success, by learning rate: means of the tuning seeds "
        f"{', '.join(map(str, TUNING_SEEDS))}; a run that never reached it counts as {2 * WHOLE:,}. "
        f"Best: GRPO {best['grpo']:g}, GiGPO {best['gigpo']:g}.",
        "",
        "| seed | before | GRPO: rollouts | GiGPO: rollouts | fewer | held out: GRPO | GiGPO | states seen once |",
        "|---|---|---|---|---|---|---|---|",
        *(
            f"| {p['seed']} | {p['begins']:.0%} | {_count(p['grpo'])} | {_count(p['gigpo'])} | {_share(p['saved'])} "
            f"| {p['held_out']['grpo']:.0%} | {p['held_out']['gigpo']:.0%} | {p['singletons']:.0%} |"
            for p in pairs
        ),
        "",
        f"GiGPO needs at least {FEWER:.0%} fewer rollouts on **{found['seeds_with_fewer']} of {len(pairs)}** seeds; "
        f"medians {found['median']['grpo']:,.0f} and {found['median']['gigpo']:,.0f} rollouts, median saving "
        f"{found['median_saved']:.0%}.",
        "",
        "| PPO with a critic, seed | before | after | held out | rollouts to 90 % | explained variance |",
        "|---|---|---|---|---|---|",
        *(
            f"| {p['seed']} | {p['before']:.0%} | {p['after']:.0%} | {p['held_out']:.0%} "
            f"| {_count(p['reached'], LONGER * TASKS * ROLLOUTS)} | {p['explained_variance']:.2f} |"
            for p in found["ppo"]
        ),
        "",
        f"KL control, target {KL_TARGET:g} nats per token, mean and maximum over the last {LAST} steps:",
        "",
        "| KL | seed | mean | max | coefficient at the end | success |",
        "|---|---|---|---|---|---|",
        *(
            f"| {'measured only' if k['where'] == 'free' else 'in the ' + k['where']} | {k['seed']} | {k['kl']:.3f} "
            f"| {k['most']:.3f} | {k['coef']:.3g} | {k['after']:.0%} |"
            for k in found["kl"]
        ),
    ]
    return "\n".join(lines)


def _count(rollouts: int | None, whole: int = WHOLE) -> str:
    return f"not in {whole:,}" if rollouts is None else f"{rollouts:,}"


def _share(saved: float | None) -> str:
    return "—" if saved is None else f"{saved:.0%}"


def _middle(curves: list[list[tuple[int, float]]]) -> list[tuple[int, float]]:
    """The median curve; a run that stopped early continues with its last value."""
    longest = max(curves, key=len)
    filled = [[*curve, *[curve[-1]] * (len(longest) - len(curve))] for curve in curves]
    return [(made, median(curve[i][1] for curve in filled)) for i, (made, _) in enumerate(longest)]


def draw(records: dict[str, Record], path: Path) -> None:
    """Success over rollouts, a thin line per seed and a bold median; and KL over steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for estimator, label, colour in (
        ("grpo", "GRPO", "#b8622b"),
        ("gigpo", "GiGPO", "#1f6f8b"),
        ("gae", "PPO", "#66727f"),
    ):
        curves = [r.curve for r in records.values() if r.job.estimator == estimator and r.job.kind in ("paired", "ppo")]
        for curve in curves:
            left.plot(*zip(*curve, strict=True), color=colour, linewidth=0.7, alpha=0.35)
        left.plot(
            *zip(*_middle(curves), strict=True),
            color=colour,
            linewidth=2.4,
            label=f"{label}, median of {len(curves)} seeds",
        )
    left.axhline(WANTED, color="#1f2933", linewidth=0.8, linestyle=":")
    left.set(xlabel="rollouts", ylabel="chance of success", ylim=(0, 1.02), title="Grid world")
    left.legend(frameon=False, loc="lower right")
    for where, colour in (("free", "#b9c3cd"), ("loss", "#1f6f8b"), ("reward", "#b8622b")):
        for record in (r for r in records.values() if r.job.kind == "kl" and r.job.name.startswith(f"kl-{where}")):
            points = [(line["step"], line["kl/reference"]) for line in record.lines if "kl/reference" in line]
            label = {"free": "no control", "loss": "in the loss", "reward": "in the reward"}[where]
            first = record.job.seed == OTHER_SEEDS[0]
            right.plot(*zip(*points, strict=True), color=colour, linewidth=1.3, label=label if first else None)
    right.axhline(KL_TARGET, color="#1f2933", linewidth=0.8, linestyle=":")
    right.set(xlabel="step", ylabel="nats per token", title=f"KL to the start; target {KL_TARGET:g}", yscale="log")
    right.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, required=True, help="records file of grid_gigpo.py")
    parser.add_argument("--picture", type=Path, help="file for the curves")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    args = parser.parse_args()
    records = read_records(args.records)
    found = figures(records)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2), encoding="utf-8")
    if args.picture is not None:
        draw(records, args.picture)
    print(section(found))


if __name__ == "__main__":
    main()
