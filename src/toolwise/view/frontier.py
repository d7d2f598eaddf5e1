"""The cost-score frontier in a run's report, read from frontier.json in its folder."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from toolwise.errors import CheckpointError
from toolwise.frontier.presentation import rename_old_curves
from toolwise.training.run_folder import RunFolder
from toolwise.training.trackers.conversation import clean_text
from toolwise.view.curves import LIGHT, Palette, draw_legend, draw_title, new_figure, style_axes, to_png

FrontierRecord = Mapping[str, Any]


def read_frontier(run: RunFolder) -> FrontierRecord | None:
    """Read frontier.json, with old curve names replaced; None if the run has none."""
    file = run.path / "frontier.json"
    if not file.exists():
        return None
    try:
        record = rename_old_curves(json.loads(file.read_bytes()))
        record["curves"]["router"], record["fixed"], record["rows"], record["draws"]
    except (ValueError, KeyError, TypeError, RecursionError) as fault:
        raise CheckpointError(f"{file}: cannot be read ({fault!r}); delete it to see the run without it") from None
    return dict(record)


def frontier_rows(frontier: FrontierRecord) -> dict[str, Any]:
    """Two tables: one row per budget, and one row per policy without a budget."""
    same = frontier["at_its_cost"]
    return {
        "held": [
            [f"{point['budget']:g}", _format_estimate(point["cost"]), _format_estimate(point["score"], interval=True)]
            + [_format_estimate(same[name][index]) for name in ("random", "oracle")]
            + [_format_estimate(frontier["gap_closed"]["router"][index], form=".0%")]
            for index, point in enumerate(frontier["curves"]["router"])
        ],
        "fixed": [
            [clean_text(name).lower(), _format_estimate(point["cost"]), _format_estimate(point["score"], interval=True)]
            for name, point in frontier["fixed"].items()
        ],
        "rows": frontier["rows"],
        "draws": frontier["draws"],
    }


def render_frontier(frontier: FrontierRecord, palette: Palette = LIGHT) -> bytes:
    """Plot score against cost: curves for policies that follow a budget, dots for fixed ones."""
    figure = new_figure(palette, (1200, 620))
    axes = figure.add_axes((0.06, 0.11, 0.91, 0.74))
    style_axes(axes, palette)
    for name, colour, line, width, label in (
        ("router", palette.after, "-", 2.4, "router, within a budget"),
        ("random", palette.before, "--", 1.5, "random routes"),
        ("oracle", palette.ink, "--", 1.3, "oracle, knows the result of every route"),
    ):
        points = sorted(frontier["curves"][name], key=lambda point: point["cost"]["value"])
        xs, ys = ([point[what]["value"] for point in points] for what in ("cost", "score"))
        axes.plot(xs, ys, color=colour, linestyle=line, linewidth=width, label=label, zorder=3)
        if name == "router":
            axes.plot(xs, ys, "o", color=colour, markersize=5, zorder=4)
            band = ([_number(point["score"][end]) for point in points] for end in ("low", "high"))
            axes.fill_between(xs, *band, color=colour, alpha=0.13, linewidth=0, zorder=1)
    _draw_fixed(axes, frontier["fixed"], palette)
    axes.set_xlabel("calls per question", color=palette.muted, fontsize=9.5)
    draw_title(axes, f"score against cost, {frontier['rows']} held-out tasks × {frontier['draws']} samples", palette)
    draw_legend(axes, palette)
    return to_png(figure)


def _draw_fixed(axes: Any, fixed: Mapping[str, Mapping[str, Any]], palette: Palette) -> None:
    """One dot each; if two are close, the label of the upper one goes above it."""
    points: list[tuple[float, float]] = []
    for name, point in sorted(fixed.items(), key=lambda item: float(item[1]["score"]["value"])):
        at = (float(point["cost"]["value"]), float(point["score"]["value"]))
        close = any(abs(at[0] - x) < 0.2 and abs(at[1] - y) < 0.03 for x, y in points)
        points.append(at)
        axes.plot(*at, "o", color=palette.cost, markersize=6, zorder=5)
        axes.annotate(
            name.lower(),
            at,
            xytext=(9, 6 if close else -12),
            textcoords="offset points",
            fontsize=9,
            color=palette.muted,
        )
    axes.margins(x=0.09)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _format_estimate(estimate: Mapping[str, Any], *, interval: bool = False, form: str = ".3f") -> str:
    if not isinstance(estimate["value"], int | float):
        return "–"
    within = f" [{_number(estimate['low']):.2f} {_number(estimate['high']):.2f}]" if interval else ""
    return f"{estimate['value']:{form}}{within}"
