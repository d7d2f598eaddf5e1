"""Plots of routing: spending against the budget, the dual variable λ, and the shares of routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolwise.training.run_folder import RunFolder
from toolwise.training.trackers.route_text import ROUTE_LABELS
from toolwise.view.curves import LIGHT, Palette, draw_title, format_step_axis, new_figure, style_axes, to_png

_BUDGET_SUFFIX, _SHARE_PREFIX = "/budget", "router/share/"
_SHADES = (0.28, 0.6, 0.95)
_LINE_STYLES = ("-", "--", ":", "-.")


def routing_columns(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Routing columns of the training table."""
    names = {name for line in lines for name in line}
    units = [name.split("/")[1] for name in sorted(names) if _is_budget(name)]
    wanted = [f"router/{unit}/{what}" for unit in units for what in ("mean", "lambda")]
    wanted += ["router/r_task", "router/entropy", *sorted(name for name in names if name.startswith(_SHARE_PREFIX))]
    return [name for name in wanted if name in names]


def render_routing(run: RunFolder, palette: Palette = LIGHT) -> bytes | None:
    """A figure of up to three panels; None if the run has no routing metrics."""
    units, routes = budget_units(run), logged_routes(run)
    panels = [*([_draw_spending, _draw_lambdas] if units else []), *([_draw_shares] if routes else [])]
    if not panels:
        return None
    figure = new_figure(palette, (1200, 520))
    grid = figure.add_gridspec(1, len(panels), left=0.05, right=0.98, top=0.78, bottom=0.14, wspace=0.22)
    for column, draw in enumerate(panels):
        axes = figure.add_subplot(grid[0, column])
        style_axes(axes, palette)
        draw(axes, run, palette)
    return to_png(figure)


def budget_units(run: RunFolder) -> list[str]:
    """Units that have a budget, such as cost."""
    return sorted({name.split("/")[1] for line in run.metrics for name in line if _is_budget(name)})


def logged_routes(run: RunFolder) -> list[str]:
    """Known routes in their usual order, then any others."""
    routes = {
        name.removeprefix(_SHARE_PREFIX) for line in run.metrics for name in line if name.startswith(_SHARE_PREFIX)
    }
    return [*(route for route in ROUTE_LABELS if route in routes), *sorted(routes - set(ROUTE_LABELS))]


def _is_budget(name: str) -> bool:
    return name.startswith("router/") and name.endswith(_BUDGET_SUFFIX) and name.count("/") == 2


def _draw_spending(axes: Any, run: RunFolder, palette: Palette) -> None:
    units = budget_units(run)
    for unit, line in zip(units, _LINE_STYLES, strict=False):
        suffix = "" if len(units) == 1 else f", {unit}"
        spent, limit = run.series(f"router/{unit}/mean"), run.series(f"router/{unit}{_BUDGET_SUFFIX}")
        axes.plot(*spent, color=palette.cost, alpha=0.55, linestyle=line, linewidth=1.4, label=f"policy{suffix}")
        if unit == "cost" and (held_out := run.series("eval/cost"))[0]:
            axes.plot(*held_out, color=palette.cost, linewidth=2.2, marker="o", markersize=5, label="held-out tasks")
        axes.plot(*limit, color=palette.ink, linestyle=line, linewidth=1.2, label=f"budget{suffix}")
    axes.set_ylim(bottom=0)
    draw_title(axes, "spending and budget", palette)
    format_step_axis(axes, palette, share=False)


def _draw_lambdas(axes: Any, run: RunFolder, palette: Palette) -> None:
    units = budget_units(run)
    for unit, line in zip(units, _LINE_STYLES, strict=False):
        label = "λ" if len(units) == 1 else f"λ, {unit}"
        axes.plot(*run.series(f"router/{unit}/lambda"), color=palette.after, linestyle=line, linewidth=2, label=label)
    axes.set_ylim(bottom=0)
    draw_title(axes, "λ, the cost of a call", palette)
    format_step_axis(axes, palette, share=False)


def _draw_shares(axes: Any, run: RunFolder, palette: Palette) -> None:
    routes = logged_routes(run)
    series = [run.series(f"{_SHARE_PREFIX}{route}") for route in routes]
    steps = sorted(set.intersection(*(set(shares[0]) for shares in series)))
    values = [[dict(zip(*shares, strict=True))[step] for step in steps] for shares in series]
    shades = [_SHADES[index % len(_SHADES)] for index in range(len(routes))]
    areas = axes.stackplot(steps, *values, labels=[ROUTE_LABELS.get(route, route.lower()) for route in routes])
    for area, shade in zip(areas, shades, strict=True):
        area.set(facecolor=palette.after, alpha=shade, edgecolor=palette.paper)
    draw_title(axes, "routes", palette)
    format_step_axis(axes, palette, share=True)
    axes.set_ylim(0, 1)
