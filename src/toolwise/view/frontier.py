"""A run's frontier on its page, read from the frontier.json in its folder: share correct against what tools cost."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from toolwise.errors import CheckpointError
from toolwise.frontier.report import rename_old_curves
from toolwise.training.run_folder import RunFolder
from toolwise.training.trackers.conversation import clean_text
from toolwise.view.curves import LIGHT, Palette, draw_legend, draw_title, new_figure, style_axes, to_png

CURVES = ("router", "random", "oracle")
FrontierRecord = Mapping[str, Any]


def read_frontier(run: RunFolder) -> FrontierRecord | None:
    """The frontier.json of a run, old names replaced; None if there is none yet."""
    file = run.path / "frontier.json"
    if not file.exists():
        return None
    try:
        record = rename_old_curves(json.loads(file.read_bytes()))
        _points(record, "router"), record["fixed"], record["rows"], record["draws"]
    except (ValueError, KeyError, TypeError, RecursionError) as fault:
        raise CheckpointError(f"{file}: cannot be read ({fault!r}); delete it to see the run without it") from None
    return dict(record)


def frontier_rows(frontier: FrontierRecord) -> dict[str, Any]:
    """Two tables: a row a budget, and a row for each who knows of none."""
    same = frontier["at_its_cost"]
    held = [
        [f"{point['budget']:g}", _format_estimate(point["cost"]), _format_estimate(point["score"], interval=True)]
        + [_format_estimate(same[name][place]) for name in ("random", "oracle")]
        + [_format_share(frontier["gap_closed"]["router"][place])]
        for place, point in enumerate(_points(frontier, "router"))
    ]
    fixed = [
        [clean_text(name).lower(), _format_estimate(point["cost"]), _format_estimate(point["score"], interval=True)]
        for name, point in frontier["fixed"].items()
    ]
    return {"held": held, "fixed": fixed, "rows": frontier["rows"], "draws": frontier["draws"]}


def render_frontier(frontier: FrontierRecord, palette: Palette = LIGHT) -> bytes:
    """Score against cost: curves for whoever can keep to a budget, a dot for whoever cannot."""
    figure = new_figure(palette, (1200, 620))
    axes = figure.add_axes((0.06, 0.11, 0.91, 0.74))
    style_axes(axes, palette)
    looks = {
        "router": (palette.after, "-", 2.4),
        "random": (palette.before, "--", 1.5),
        "oracle": (palette.ink, "--", 1.3),
    }
    for name in CURVES:
        points = sorted(_points(frontier, name), key=lambda point: point["cost"]["value"])
        xs, ys = ([point[what]["value"] for point in points] for what in ("cost", "score"))
        colour, line, width = looks[name]
        axes.plot(xs, ys, color=colour, linestyle=line, linewidth=width, label=_LABELS[name], zorder=3)
        if name == "router":
            axes.plot(xs, ys, "o", color=colour, markersize=5, zorder=4)
            axes.fill_between(xs, *_band(points), color=colour, alpha=0.13, linewidth=0, zorder=1)
    _draw_fixed(axes, frontier["fixed"], palette)
    axes.set_xlabel("calls per question", color=palette.muted, fontsize=9.5)
    draw_title(axes, f"score against cost, {frontier['rows']} held-out questions × {frontier['draws']} draws", palette)
    draw_legend(axes, palette)
    return to_png(figure)


def _draw_fixed(axes: Any, fixed: Mapping[str, Mapping[str, Any]], palette: Palette) -> None:
    """A dot each; of two that lie together the upper one has its name above it."""
    known: list[tuple[float, float]] = []
    for name, point in sorted(fixed.items(), key=lambda item: float(item[1]["score"]["value"])):
        at = (float(point["cost"]["value"]), float(point["score"]["value"]))
        close = any(abs(at[0] - x) < 0.2 and abs(at[1] - y) < 0.03 for x, y in known)
        known.append(at)
        axes.plot(*at, "o", color=palette.cost, markersize=6, zorder=5)
        offset = (9, 6 if close else -12)
        axes.annotate(name.lower(), at, xytext=offset, textcoords="offset points", fontsize=9, color=palette.muted)
    axes.margins(x=0.09)


_LABELS = {
    "router": "router, held to a budget",
    "random": "random routes",
    "oracle": "oracle: knows the outcome of each route",
}


def _points(frontier: FrontierRecord, name: str) -> Sequence[Mapping[str, Any]]:
    points: Sequence[Mapping[str, Any]] = frontier["curves"][name]
    return points


def _band(points: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    return [[_number(point["score"][end]) for point in points] for end in ("low", "high")]


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _format_estimate(found: Mapping[str, Any], *, interval: bool = False) -> str:
    if not isinstance(found["value"], int | float):
        return "–"
    within = f" [{_number(found['low']):.2f} {_number(found['high']):.2f}]" if interval else ""
    return f"{found['value']:.3f}{within}"


def _format_share(found: Mapping[str, Any]) -> str:
    return f"{found['value']:.0%}" if isinstance(found["value"], int | float) else "–"
