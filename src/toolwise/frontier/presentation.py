"""A frontier as tables, as a plot and as JSON, and the names of the routers in them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from io import BytesIO
from typing import TYPE_CHECKING, Any

from toolwise.serialization.json_text import to_jsonable

if TYPE_CHECKING:
    from rich.table import Table

    from toolwise.frontier.reference_curves import Estimate
    from toolwise.frontier.router_comparison import Frontier, Point

CLASSIFIER, ORACLE_LABELS = "classifier", "oracle labels"
"""Baseline routers over the same routes; see `frontier/baselines.py`."""
_COLOURS = {
    "router": "#1f6f8b",
    "oracle": "#1f2933",
    "random": "#b9c3cd",
    CLASSIFIER: "#b8622b",
    ORACLE_LABELS: "#c9a227",
    "best fixed mixture": "#97a3af",
}
_OLD_NAMES = {
    "told the kinds": ORACLE_LABELS,
    "best blind lottery": "best fixed mixture",
    "oracle, other draws": "oracle, held-out draws",
}
"""Names in frontier.json files of earlier versions -> names now."""
_OLD_NAME = re.compile("|".join(_OLD_NAMES))
_FIXED = "#66727f"
_SIGNED, _PERCENT = ("+.3f", "+.2f"), (".0%", ".0%")


def as_json(frontier: Frontier) -> dict[str, Any]:
    """Every estimate with its interval; null where a value is not finite."""
    record: dict[str, Any] = to_jsonable(asdict(frontier))
    return record


def rename_old_curves(record: Any) -> Any:
    """A stored frontier with the names that this version gives to curves and baselines."""
    if isinstance(record, dict):
        # Old names also occur within longer ones: "ahead of NAME", "NAME, as trained".
        return {_OLD_NAME.sub(lambda m: _OLD_NAMES[m[0]], key): rename_old_curves(v) for key, v in record.items()}
    return [rename_old_curves(item) for item in record] if isinstance(record, list) else record


def tables(frontier: Frontier, title: str) -> list[Table]:
    """One table of budgets, one per baseline router, and one of the methods without a budget."""
    left = f"; {frontier.left_out:,} more could not be scored" if frontier.left_out else ""
    router, *others = frontier.gap_closed
    first = _table(["budget", "cost", router, "random", "oracle", "gap closed"], title)
    first.caption = f"{frontier.rows:,} rows × {frontier.draws} draws{left}; random and oracle at the router's cost"
    result = [first, *(_table(["budget", "cost", name, "gap closed", f"{router} ahead by"]) for name in others)]
    for name, table in zip(frontier.gap_closed, result, strict=True):
        for i, point in enumerate(frontier.curves[name]):
            cells = [_format_estimate(frontier.gap_closed[name][i], *_PERCENT)]
            if name == router:
                cells = [*(f"{frontier.at_its_cost[curve][i].value:.3f}" for curve in ("random", "oracle")), *cells]
            else:
                cells.append(_format_estimate(frontier.ahead[name][i], *_SIGNED))
            table.add_row(f"{point.budget:g}", f"{point.cost.value:.3f}", _format_estimate(point.score), *cells)
    fixed = _table(["no budget", "cost", "score"])
    for name, point in frontier.fixed.items():
        fixed.add_row(name, _format_estimate(point.cost), _format_estimate(point.score))
    if trained := frontier.as_trained:
        leads = [f"{_format_estimate(trained[f'ahead of {name}'], *_SIGNED)} ahead of {name}" for name in others]
        fixed.caption = "; ".join(
            [f"{router}, as trained: {_format_estimate(trained['gap_closed'], *_PERCENT)} of the gap closed", *leads]
        )
    return [*result, fixed]


def _table(columns: Sequence[str], title: str | None = None) -> Table:
    from rich.table import Table

    table = Table(title=title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    return table


def _format_estimate(estimate: Estimate, form: str = ".3f", bound_form: str = ".2f") -> str:
    if not math.isfinite(estimate.value):
        return "–"
    return f"{estimate.value:{form}} [{estimate.low:{bound_form}} {estimate.high:{bound_form}}]"


def plot_frontier(frontier: Frontier, title: str) -> bytes:
    """Score against cost, as PNG: curves with their intervals, and a dot for each method without a budget."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), dpi=110, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, points in frontier.curves.items():
        _draw_curve(axes, name, points)
    for name, point in frontier.fixed.items():
        axes.plot([point.cost.value], [point.score.value], "o", color=_FIXED, markersize=4)
        axes.annotate(
            name.lower(),
            (point.cost.value, point.score.value),
            xytext=(5, -9),
            textcoords="offset points",
            fontsize=8,
            color=_FIXED,
        )
    axes.set(xlabel="mean cost per prompt", ylabel="score", axisbelow=True)
    axes.set_title(f"{title}  ({frontier.rows:,} rows × {frontier.draws} draws)", fontsize=11, loc="left")
    axes.grid(color="#e4e7eb", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    figure.tight_layout()
    out = BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def _draw_curve(axes: Any, name: str, points: Sequence[Point]) -> None:
    colour = _COLOURS.get(name, _FIXED)
    by_cost = sorted(points, key=lambda point: point.cost.value)
    costs = [point.cost.value for point in by_cost]
    dashed = name not in ("router", CLASSIFIER, ORACLE_LABELS)
    axes.plot(
        costs,
        [point.score.value for point in by_cost],
        color=colour,
        linestyle="--" if dashed else "-",
        marker="" if dashed else "o",
        markersize=3.5,
        linewidth=2 if name == "router" else 1.3,
        label=name,
        zorder=3 if name == "router" else 2,
    )
    if not dashed:
        lows, highs = [p.score.low for p in by_cost], [p.score.high for p in by_cost]
        axes.fill_between(costs, lows, highs, color=colour, alpha=0.15, linewidth=0)
