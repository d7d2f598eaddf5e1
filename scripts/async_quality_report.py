"""Tables and curves of `scripts/async_quality.py --report`, by the rules that were fixed before the runs:

area      the mean score over all evaluations after the start: how fast and how well a run learns
final     the mean score over the last quarter of the evaluations
lost      area of the same seed without staleness, less this run's; mean and 95 % interval (Student's t)
collapsed runs whose final score is less than half of that without staleness
default   the correction with the smallest mean loss of area over both worlds and both bounds; of two whose
          difference, paired by world, bound and seed, has an interval that contains 0, the one that comes first in
          none, ppo, dppo, tis, decoupled: the fewer computations
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from async_quality import LOSSES, SEEDS, STALENESS, STEPS, Record, read_record

T_VALUES = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 10: 2.262, 20: 2.093}
"""Student's t of a 95 % interval, by the number of values."""
CHEAPEST = ("none", "ppo", "dppo", "tis", "decoupled")
Cell = tuple[str, str, int, str]
"""World, estimator, staleness, loss."""
Cells = dict[Cell, dict[int, Record]]
"""By seed."""


def report(folder: Path, picture: Path | None) -> str:
    cells: Cells = defaultdict(dict)
    for path in sorted(folder.rglob("*.jsonl")):
        if (record := read_record(path)) is not None:
            job = record.job
            cells[job.world, job.estimator, job.staleness, job.loss][job.seed] = record
    parts = [table(cells, world) for world in ("grid", "demo")]
    parts += [choice(cells), estimators(cells)]
    if picture is not None:
        draw(cells, picture)
    runs = sum(map(len, cells.values()))
    seconds = fmean(record.seconds for cell in cells.values() for record in cell.values())
    return "\n\n".join([*parts, f"{runs} runs of {seconds:.0f} s in the mean."])


def table(cells: Cells, world: str) -> str:
    lines = [
        f"| {world} world: staleness | correction | runs | area | final | area lost to staleness | collapsed | ess |",
        "|---|---|---|---|---|---|---|---|",
    ]
    fresh = cells.get((world, "grpo", 0, "none"), {})
    for staleness, loss in [(0, "none"), *((s, loss) for s in STALENESS for loss in LOSSES)]:
        own = cells.get((world, "grpo", staleness, loss), {})
        if not own:
            continue
        areas, finals = [r.area for r in own.values()], [r.final for r in own.values()]
        lost = [fresh[seed].area - own[seed].area for seed in own if seed in fresh]
        collapsed = sum(own[seed].final < fresh[seed].final / 2 for seed in own if seed in fresh)
        name, ess = (loss if staleness else "–"), fmean(r.ess for r in own.values())
        cost = interval(lost) if staleness else "–"
        row = (staleness, name, len(own), interval(areas), interval(finals), cost, collapsed, f"{ess:.3f}")
        lines.append(f"| {' | '.join(map(str, row))} |")
    return "\n".join(lines)


def losses_of(cells: Cells, loss: str) -> dict[tuple[str, int, int], float]:
    """Area lost, by world, staleness and seed."""
    return {
        (world, staleness, seed): cells[world, "grpo", 0, "none"][seed].area - record.area
        for (world, estimator, staleness, name), own in cells.items()
        if estimator == "grpo" and staleness and name == loss
        for seed, record in own.items()
        if seed in cells.get((world, "grpo", 0, "none"), {})
    }


def choice(cells: Cells) -> str:
    """The default by the rule."""
    lost = {loss: values for loss in CHEAPEST if (values := losses_of(cells, loss))}
    if not lost:
        return "no default: no runs without staleness to compare with"
    best = min(lost, key=lambda loss: fmean(lost[loss].values()))
    lines = ["| correction | runs | mean area lost | more than the best, paired |", "|---|---|---|---|"]
    chosen = best
    for loss in reversed(CHEAPEST):
        if loss not in lost:
            continue
        more = [lost[loss][key] - lost[best][key] for key in lost[loss] if key in lost[best]]
        within = loss != best and bounds(more)[0] <= 0.0
        if within and CHEAPEST.index(loss) < CHEAPEST.index(chosen):
            chosen = loss
        paired = "–" if loss == best else interval(more)
        lines.append(f"| {loss} | {len(lost[loss])} | {fmean(lost[loss].values()):.4f} | {paired} |")
    wanted = len(STEPS) * len(STALENESS) * len(SEEDS)
    if missing := sum(wanted - len(values) for values in lost.values()):
        end = f"No default yet: {missing} of {wanted * len(lost)} runs are missing."
    else:
        end = f'By the rule: `actor.policy_loss = "{chosen}"` (smallest mean loss: {best}).'
    return "\n".join([*lines, "", end])


def estimators(cells: Cells) -> str:
    """GiGPO beside GRPO, on the grid world."""
    lines = [
        "| grid world | staleness | runs | area | final | rollouts to 90 % (median) |",
        "|---|---|---|---|---|---|",
    ]
    for estimator, staleness in (("grpo", 0), ("grpo", 2), ("gigpo", 0), ("gigpo", 2)):
        loss = "none" if (estimator, staleness) == ("grpo", 0) else "decoupled"
        own = list(cells.get(("grid", estimator, staleness, loss), {}).values())
        if not own:
            continue
        reached = sorted(next((made for made, score in r.curve if score >= 0.9), 10**9) for r in own)
        middle = reached[len(reached) // 2]
        cell = f"{middle:,}" if middle < 10**9 else "not reached"
        areas, finals = interval([r.area for r in own]), interval([r.final for r in own])
        lines.append(f"| {estimator} | {staleness} | {len(own)} | {areas} | {finals} | {cell} |")
    return "\n".join(lines)


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """A 95 % interval of the mean; of one value the whole line."""
    if len(values) < 2:
        return -math.inf, math.inf
    known = max((count for count in T_VALUES if count <= len(values)), default=2)
    half = T_VALUES[known] * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def interval(values: Sequence[float]) -> str:
    if not values:
        return "–"
    low, high = bounds(values)
    return f"{fmean(values):.3f} ± {(high - low) / 2:.3f}" if math.isfinite(low) else f"{fmean(values):.3f}"


def mean_curve(own: dict[int, Record]) -> list[tuple[int, float]]:
    curves = [record.curve for record in own.values()]
    return [(points[0][0], fmean(score for _, score in points)) for points in zip(*curves, strict=False)]


def draw(cells: Cells, path: Path) -> None:
    """Mean score over rollouts, one panel for each world and bound, of the seeds that all of its lines have."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, 2, sharey="row")
    for row, world in zip(grid, ("grid", "demo"), strict=True):
        for axes, staleness in zip(row, STALENESS, strict=True):
            shown = [(0, "none", "staleness 0"), *((staleness, loss, loss) for loss in LOSSES)]
            lines = [cells[key] for bound, loss, _ in shown if (key := (world, "grpo", bound, loss)) in cells]
            seeds = set.intersection(*map(set, lines)) if lines else set[int]()
            for bound, loss, label in shown:
                own = cells.get((world, "grpo", bound, loss), {})
                if own and seeds:
                    curve = mean_curve({seed: own[seed] for seed in seeds})
                    style = {"color": "black", "linestyle": "--"} if bound == 0 else {}
                    axes.plot(*zip(*curve, strict=True), label=label, linewidth=1.6, **style)
            axes.set_title(f"{world} world, staleness {staleness}")
            axes.set_xlabel("rollouts")
            axes.set_ylabel("score")
            axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
