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
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from toolwise.view.curves import draw_seeds

COLUMNS = (
    *("seed", "correct before", "after", "rise", "cost before", "after", "cost, sampled routes"),
    *("gap closed", "all tools", "seconds", "peak memory", "load"),
)


def demo(more: list[str], seed: int, folder: Path) -> str:
    """Run one seed and return its row of the table."""
    command = [sys.executable, "-m", "toolwise", "demo", "--seed", str(seed), "--out", str(folder), *more]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    summary = json.loads((folder / "summary.json").read_text())
    frontier = json.loads((folder / "frontier.json").read_text())
    trained, tools = frontier["fixed"]["router, as trained"], frontier["fixed"]["ALL-TOOLS"]
    before, after = summary["before"], summary["after"]
    cells = [
        str(seed),
        f"{before['correct']:.3f}",
        f"{after['correct']:.3f}",
        f"{after['correct'] - before['correct']:+.3f}",
        f"{before['cost']:.2f}",
        f"{after['cost']:.2f}",
        f"{trained['cost']['value']:.2f}",
        f"{frontier['as_trained']['gap_closed']['value']:.0%}",
        f"{tools['score']['value']:.2f} for {tools['cost']['value']:.2f}",
        f"{summary['seconds']:.0f}",
        f"{summary['peak_rss_mb']:.0f} MB",
        f"{os.getloadavg()[0]:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


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
