"""A cost-score frontier as tables and as a plot, from `Frontier.to_json` or from frontier.json in a run's folder."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolwise.errors import CheckpointError
from toolwise.routing.delivered_budget import format_cost
from toolwise.training.run_folder import RunFolder
from toolwise.training.trackers.conversation import clean_text
from toolwise.view.curves import LIGHT, Palette, draw_legend, draw_title, new_figure, style_axes, to_png

if TYPE_CHECKING:
    from rich.table import Table

FrontierRecord = Mapping[str, Any]
_OLD_NAMES = {
    "told the kinds": "oracle labels",
    "best blind lottery": "best fixed mixture",
    "oracle, other draws": "oracle, held-out draws",
    ", as trained": ", sampled, not calibrated",
}
"""Names in frontier.json files of earlier versions -> names now."""
_OLD_NAME = re.compile("|".join(_OLD_NAMES))
_CURVE_STYLES = {
    "router": ("after", "-", "o"),
    "classifier": ("cost", "-", "o"),
    "oracle labels": ("cost", "-.", "o"),
    "confidence": ("ink", "-", "s"),
    "prompted": ("muted", "-", "s"),
    "random": ("before", "--", ""),
    "best fixed mixture": ("muted", "--", ""),
    "oracle": ("ink", "--", ""),
    "oracle, held-out draws": ("ink", ":", ""),
}
"""Colour in the palette, line and marker."""
_LEGEND_COLUMNS = 5
COST_TOLERANCE = 0.05
"""Costs that differ by a larger share are pointed out where scores are compared."""
_SIGNED, _PERCENT = ("+.3f", "+.2f"), (".0%", ".0%")


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


def rename_old_curves(record: Any) -> Any:
    """A stored frontier with the names that this version gives to curves and baselines."""
    if isinstance(record, dict):
        # Old names also occur within longer ones: "ahead of NAME".
        return {_OLD_NAME.sub(lambda m: _OLD_NAMES[m[0]], key): rename_old_curves(v) for key, v in record.items()}
    return [rename_old_curves(item) for item in record] if isinstance(record, list) else record


def budget_rows(frontier: FrontierRecord, gap_forms: Sequence[str] = (".0%",)) -> list[list[str]]:
    """The router at each budget: budget, cost, score, the scores of random routes and of the oracle at that cost, and
    how much of the gap between these two the router closes."""
    same = frontier["at_its_cost"]
    return [
        [
            *_point_cells(point),
            *(_format_estimate(same[name][index], ".3f") for name in ("random", "oracle")),
            _format_estimate(frontier["gap_closed"]["router"][index], *gap_forms),
        ]
        for index, point in enumerate(frontier["curves"]["router"])
    ]


def fixed_rows(frontier: FrontierRecord) -> list[list[str]]:
    """Policies without a budget: name, cost, score."""
    return [
        [clean_text(name), _format_cost(point), _format_estimate(point["score"])]
        for name, point in frontier["fixed"].items()
    ]


def frontier_tables(frontier: FrontierRecord, title: str) -> list[Table]:
    """For a terminal: one table of budgets, one per baseline router, and one of the policies without a budget."""
    router, *others = frontier["gap_closed"]
    left = f"; {frontier['left_out']:,} more could not be scored" if frontier["left_out"] else ""
    size = f"{frontier['rows']:,} rows × {frontier['draws']} draws{left}"
    tables = [
        _table(
            ["budget", "cost", router, "random", "oracle", "gap closed"],
            budget_rows(frontier, _PERCENT),
            title=title,
            caption=f"{size}; random and oracle at the router's cost",
        )
    ]
    for name in others:
        closed, ahead = frontier["gap_closed"][name], frontier["ahead"][name]
        rows = [
            [*_point_cells(point), _format_estimate(closed[i], *_PERCENT), _format_estimate(ahead[i], "+.2f", "+.2f")]
            for i, point in enumerate(frontier["curves"][name])
        ]
        headers = ["budget", "cost", name, "gap closed", f"{router} ahead by"]
        tables.append(_table(headers, rows, caption=_comparison_caption(frontier, name, router)))
    for name, shares in (frontier.get("within") or {}).items():
        points = frontier["curves"][name]
        rows = [[*_point_cells(point), f"{share:.0%}"] for point, share in zip(points, shares, strict=True)]
        tables.append(_table(["budget", "cost", name, "episodes within"], rows))
    if frontier.get("against_fixed"):
        tables.append(_against_fixed_table(frontier, router))
    caption = None
    if trained := frontier["as_trained"]:
        closes = f"{_format_estimate(trained['gap_closed'], *_PERCENT)} of the gap closed"
        gap = f"{router}, routes sampled from its head and not calibrated: {closes}"
        leads = (f"{_format_estimate(trained[f'ahead of {name}'], *_SIGNED)} ahead of {name}" for name in others)
        caption = "; ".join([gap, *leads])
    return [*tables, _table(["no budget", "cost", "score"], fixed_rows(frontier), caption=caption)]


def _comparison_caption(frontier: FrontierRecord, name: str, router: str) -> str | None:
    """What to mind in the comparison with a baseline router."""
    notes = []
    points = zip(frontier["curves"][router], frontier["curves"][name], strict=True)
    if any(_cost_less(a, b) or _cost_less(b, a) for a, b in points):
        notes.append(f"its costs are not {router}'s: compare the gaps closed")
    most = [_number(closed[end]) for closed in frontier["gap_closed"][name] for end in ("value", "high")]
    if (more := (frontier.get("beyond_routes") or {}).get(name)) and any(gap >= 1.005 for gap in most):
        notes.append(f"above 100%: it may choose {', '.join(map(clean_text, more))}, the oracle only routes")
    return "; ".join(notes) or None


def _against_fixed_table(frontier: FrontierRecord, router: str) -> Table:
    """The first router beside everything that is not routed, each with what it costs."""
    rows, dearer = [], []
    for name, each in frontier["against_fixed"].items():
        fixed = frontier["fixed"][name]
        rows.append(
            [
                clean_text(name),
                *(
                    cell
                    for point in (fixed, each)
                    for cell in (_format_cost(point), _format_estimate(point["score"], ".3f"))
                ),
                _format_estimate(each["ahead"], *_SIGNED),
            ]
        )
        if _cost_less(each, fixed):
            dearer.append(clean_text(name))
    caption = f"{router} is held to the other's cost"
    if dearer:
        caption += f", and needs less than {', '.join(dearer)}"
    headers = ["not routed", "cost", "score", f"{router}, cost", "score", f"lead of {router}"]
    return _table(headers, rows, caption=caption)


def _cost_less(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return bool(one["cost"]["value"] < (1.0 - COST_TOLERANCE) * other["cost"]["value"])


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], **options: Any) -> Table:
    from rich.table import Column, Table

    headers = (Column(name, justify="right" if index else "left", no_wrap=True) for index, name in enumerate(columns))
    table = Table(*headers, **options)
    for row in rows:
        table.add_row(*row)
    return table


def _point_cells(point: Mapping[str, Any]) -> list[str]:
    """Budget, cost, and score with its interval."""
    return [f"{point['budget']:g}", _format_cost(point), _format_estimate(point["score"])]


def _format_cost(point: Mapping[str, Any]) -> str:
    cost = point["cost"]["value"]
    return format_cost(cost) if isinstance(cost, int | float) else "–"


def _format_score(point: Mapping[str, Any]) -> str:
    return _format_estimate(point["score"], ".3f")


def _format_estimate(estimate: Mapping[str, Any], *forms: str) -> str:
    """The value in the first form and, if there is a second one, the interval; by default both."""
    form, *bound_form = forms or (".3f", ".2f")
    if not isinstance(estimate["value"], int | float):
        return "–"
    within = [f" [{_number(estimate['low']):{f}} {_number(estimate['high']):{f}}]" for f in bound_form]
    return "".join([f"{estimate['value']:{form}}", *within])


def render_frontier(frontier: FrontierRecord, palette: Palette = LIGHT, name: str = "") -> bytes:
    """Plot score against cost: curves for policies that follow a budget, dots for fixed ones."""
    figure = new_figure(palette, (1200, 620))
    axes = figure.add_axes((0.06, 0.11, 0.91, 0.72))
    style_axes(axes, palette)
    for curve, points in frontier["curves"].items():
        _draw_curve(axes, curve, sorted(points, key=lambda point: point["cost"]["value"]), palette)
    _draw_fixed(axes, frontier["fixed"], palette)
    axes.set_xlabel("mean cost per question", color=palette.muted, fontsize=9.5)
    title = f"score against cost, {frontier['rows']} held-out tasks × {frontier['draws']} samples"
    rows = math.ceil(len(frontier["curves"]) / _LEGEND_COLUMNS)
    draw_title(axes, f"{name}: {title}" if name else title, palette, legend_rows=rows)
    draw_legend(axes, palette, columns=_LEGEND_COLUMNS)
    return to_png(figure)


def _draw_curve(axes: Any, name: str, points: Sequence[Mapping[str, Any]], palette: Palette) -> None:
    """Routers have a marker at each budget, and the evaluated one its interval."""
    colour_name, line, marker = _CURVE_STYLES.get(name, ("muted", "-", ""))
    colour, width = getattr(palette, colour_name), 2.4 if name == "router" else 1.4
    xs, ys = ([point[what]["value"] for point in points] for what in ("cost", "score"))
    axes.plot(xs, ys, color=colour, linestyle=line, linewidth=width, marker=marker, markersize=5, label=name, zorder=3)
    if name == "router":
        band = ([_number(point["score"][end]) for point in points] for end in ("low", "high"))
        axes.fill_between(xs, *band, color=colour, alpha=0.13, linewidth=0, zorder=1)


def _draw_fixed(axes: Any, fixed: Mapping[str, Mapping[str, Any]], palette: Palette) -> None:
    """One dot each; if two are close, the label of the upper one goes above it."""
    points: list[tuple[float, float]] = []
    for name, point in sorted(fixed.items(), key=lambda item: float(item[1]["score"]["value"])):
        at = (float(point["cost"]["value"]), float(point["score"]["value"]))
        close = any(abs(at[0] - x) < 0.2 and abs(at[1] - y) < 0.03 for x, y in points)
        points.append(at)
        axes.plot(*at, "o", color=palette.ink, markersize=6, zorder=5)
        axes.annotate(
            clean_text(name).lower(),
            at,
            xytext=(9, 6 if close else -12),
            textcoords="offset points",
            fontsize=9,
            color=palette.muted,
        )
    axes.margins(x=0.09)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
