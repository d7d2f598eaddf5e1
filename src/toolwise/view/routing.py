"""Plots of routing: spending against the budget, the dual variable λ, and the shares of routes."""

from __future__ import annotations

from collections.abc import Collection
from itertools import cycle
from typing import Any

from toolwise.training.run_folder import RunFolder, shared_steps
from toolwise.training.trackers.route_text import ROUTE_LABELS
from toolwise.view.curves import LIGHT, DrawPanel, Palette, draw_panels, label_step_axes, new_figure

_SHARE_PREFIX = "router/share/"
_SHADES = (0.28, 0.6, 0.95)
_LINE_STYLES = ("-", "--", ":", "-.")


def routing_columns(names: Collection[str]) -> list[str]:
    """The routing metrics among `names`, for the training table."""
    wanted = [f"router/{unit}/{what}" for unit in budget_units(names) for what in ("mean", "lambda")]
    wanted += ["router/r_task", "router/entropy", *sorted(name for name in names if name.startswith(_SHARE_PREFIX))]
    return [name for name in wanted if name in names]


def render_routing(run: RunFolder, palette: Palette = LIGHT) -> bytes | None:
    """A figure of up to three panels; None if the run has no routing metrics."""
    panels: list[DrawPanel] = [_draw_spending, _draw_lambdas] if budget_units(run.metric_names) else []
    panels += [_draw_shares] if logged_routes(run) else []
    if not panels:
        return None
    figure = new_figure(palette, (1200, 520))
    return draw_panels(figure, run, palette, panels, left=0.05, right=0.98, top=0.78, bottom=0.14, wspace=0.22)


def budget_units(names: Collection[str]) -> list[str]:
    """Units that have a budget, such as cost."""
    parts = [name.split("/") for name in sorted(names)]
    return [part[1] for part in parts if len(part) == 3 and (part[0], part[2]) == ("router", "budget")]


def logged_routes(run: RunFolder) -> list[str]:
    """Known routes in their usual order, then any others."""
    routes = {name.removeprefix(_SHARE_PREFIX) for name in run.metric_names if name.startswith(_SHARE_PREFIX)}
    return [*(route for route in ROUTE_LABELS if route in routes), *sorted(routes - set(ROUTE_LABELS))]


def _draw_spending(axes: Any, run: RunFolder, palette: Palette) -> None:
    units = budget_units(run.metric_names)
    for unit, line in zip(units, _LINE_STYLES, strict=False):
        suffix = "" if len(units) == 1 else f", {unit}"
        spent, limit = run.series(f"router/{unit}/mean"), run.series(f"router/{unit}/budget")
        axes.plot(*spent, color=palette.cost, alpha=0.55, linestyle=line, linewidth=1.4, label=f"policy{suffix}")
        if unit == "cost" and (held_out := run.series("eval/cost"))[0]:
            axes.plot(*held_out, color=palette.cost, linewidth=2.2, marker="o", markersize=5, label="held-out tasks")
        axes.plot(*limit, color=palette.ink, linestyle=line, linewidth=1.2, label=f"budget{suffix}")
    axes.set_ylim(bottom=0)
    label_step_axes(axes, "spending and budget", palette)


def _draw_lambdas(axes: Any, run: RunFolder, palette: Palette) -> None:
    units = budget_units(run.metric_names)
    for unit, line in zip(units, _LINE_STYLES, strict=False):
        label = "λ" if len(units) == 1 else f"λ, {unit}"
        axes.plot(*run.series(f"router/{unit}/lambda"), color=palette.after, linestyle=line, linewidth=2, label=label)
    axes.set_ylim(bottom=0)
    label_step_axes(axes, "λ, the cost of a call", palette)


def _draw_shares(axes: Any, run: RunFolder, palette: Palette) -> None:
    routes = logged_routes(run)
    steps, values = shared_steps([run.series(f"{_SHARE_PREFIX}{route}") for route in routes])
    areas = axes.stackplot(steps, *values, labels=[ROUTE_LABELS.get(route, route.lower()) for route in routes])
    for area, shade in zip(areas, cycle(_SHADES), strict=False):
        area.set(facecolor=palette.after, alpha=shade, edgecolor=palette.paper)
    label_step_axes(axes, "routes", palette, share=True)
    axes.set_ylim(0, 1)
