"""Run the demo with several seeds, print the table of docs/results.md and draw the curves. Unknown options are passed
to `toolwise demo`.

python scripts/five_seeds.py --out runs/seeds --picture docs/images/seeds.png
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from toolwise.errors import ToolwiseError
from toolwise.frontier.rollout_pool import ALL_TOOLS
from toolwise.frontier.router_comparison import AS_DELIVERED
from toolwise.training.run_folder import open_run, shared_steps
from toolwise.view.curves import LIGHT, label_step_axes, new_figure, style_axes, to_png

COLUMNS = (
    *("seed", "correct before", "after", "rise", "cost before", "after", "standard error", "expected cost"),
    *("gap closed", "all tools", "seconds", "peak memory", "load"),
)


def demo(more: list[str], seed: int, folder: Path) -> str:
    """Run one seed and return its row of the table."""
    command = [sys.executable, "-m", "toolwise", "demo", "--seed", str(seed), "--out", str(folder), *more]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    summary = json.loads((folder / "summary.json").read_text())
    frontier = json.loads((folder / "frontier.json").read_text())
    return " | ".join(["", *row(seed, summary, frontier), f"{os.getloadavg()[0]:.1f}", ""]).strip()


def row(seed: int, summary: dict[str, Any], frontier: dict[str, Any]) -> list[str]:
    """A seed's cells, without the load: the router as it is delivered, calibrated."""
    delivered, tools = frontier["fixed"][f"router{AS_DELIVERED}"], frontier["fixed"][ALL_TOOLS]
    before, after = summary["before"], summary["after"]
    return [
        str(seed),
        f"{before['correct']:.3f}",
        f"{after['correct']:.3f}",
        f"{after['correct'] - before['correct']:+.3f}",
        f"{before['cost']:.2f}",
        f"{after['cost']:.2f}",
        f"{after['budget/cost/stderr']:.3f}",
        f"{delivered['cost']['value']:.2f}",
        f"{frontier['as_delivered']['gap_closed']['value']:.0%}",
        f"{tools['score']['value']:.2f} for {tools['cost']['value']:.2f}",
        f"{summary['seconds']:.0f}",
        f"{summary['peak_rss_mb']:.0f} MB",
    ]


def draw_seeds(run_dirs: Sequence[Path], out: Path) -> Path:
    """Plot validation over steps for several runs of one recipe: thin lines for runs, a bold one for the mean."""
    runs = [open_run(run_dir) for run_dir in run_dirs]
    name = "correct" if any(run.series("eval/correct")[0] for run in runs) else "score"
    if not (curves := [series for run in runs if (series := run.series(f"eval/{name}"))[0]]):
        raise ToolwiseError(f"no validation metrics in {', '.join(map(str, run_dirs)) or 'no runs'}; nothing to plot")
    figure = new_figure(LIGHT, (900, 560))
    axes = figure.add_axes((0.09, 0.12, 0.87, 0.76))
    style_axes(axes, LIGHT)
    for index, (steps, values) in enumerate(curves):
        label = None if index else f"{len(curves)} runs, one line each"
        axes.plot(steps, values, color=LIGHT.before, linewidth=1.3, label=label, zorder=2)
    shared, by_run = shared_steps(curves)
    if len(curves) > 1 and shared:
        mean = [sum(values) / len(values) for values in zip(*by_run, strict=True)]
        axes.plot(shared, mean, color=LIGHT.after, linewidth=2.4, marker="o", markersize=5, label="mean", zorder=3)
    label_step_axes(
        axes, f"{'share correct' if name == 'correct' else name}, held-out tasks", LIGHT, share=name == "correct"
    )
    out.write_bytes(to_png(figure))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--picture", type=Path, required=True, help="file for the curves")
    parser.add_argument("--jobs", type=int, default=1, help="concurrent runs; use 1 for meaningful timings")
    args, more = parser.parse_known_args()
    folders = [args.out / f"seed-{seed}" for seed in range(args.seeds)]
    print(f"| {' | '.join(COLUMNS)} |")
    print("|---" * len(COLUMNS) + "|")
    with ThreadPoolExecutor(args.jobs) as pool:
        for line in pool.map(partial(demo, more), range(args.seeds), folders):
            print(line, flush=True)
    draw_seeds(folders, args.picture)


if __name__ == "__main__":
    main()
