"""Figures of a run's routing and thinking: spending, λ, shares of routes and levels, and what a level is worth."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import cycle
from typing import Any

from toolwise.training.run_folder import RunFolder, shared_steps
from toolwise.training.trackers.console import ROUTE_LABELS
from toolwise.view.curves import LIGHT, DrawPanel, Palette, draw_panels, draw_title, label_step_axes, new_figure

THINKING_COLUMNS = (
    "thinking/tokens_per_step",
    "thinking/format_valid",
    "thinking/names_action",
    "thinking/alternatives_name_action",
    "thinking/advantage",
    "thinking/failed_alternatives",
    "thinking/added_tokens_ratio",
)
LEVEL_SHADES = {1: 0.3, 2: 0.5, 3: 0.75, 4: 1.0}
_ROUTE_SHADES = (0.28, 0.6, 0.95)
_LINE_STYLES = ("-", "--", ":", "-.")
_SHARE_PREFIX = "router/share/"


def routing_columns(names: Collection[str]) -> list[str]:
    """The routing metrics among `names`, for the training table."""
    wanted = [f"router/{unit}/{what}" for unit in budget_units(names) for what in ("mean", "lambda")]
    wanted += ["router/r_task", "router/entropy", *sorted(name for name in names if name.startswith(_SHARE_PREFIX))]
    return [name for name in wanted if name in names]


def thinking_columns(names: Collection[str]) -> list[str]:
    """The thinking metrics among `names`, including λ for thinking and for tools, for the training table."""
    shares = sorted(n for n in names if n.startswith("thinking/") and n.endswith("_share"))
    if not shares:
        return []
    return [
        *(n for n in THINKING_COLUMNS if n in names),
        *shares,
        *sorted(n for n in names if n.startswith("thinking/advantage_level_")),
        *sorted(n for n in names if n.endswith("/lambda")),
    ]


def render_routing(run: RunFolder, palette: Palette = LIGHT) -> bytes | None:
    """A figure of up to three panels; None if the run has no routing metrics."""
    panels: list[DrawPanel] = [_draw_spending, _draw_budget_lambdas] if budget_units(run.metric_names) else []
    panels += [_draw_routes] if logged_routes(run) else []
    return _draw_row(run, palette, panels, wspace=0.22)


def render_thinking(run: RunFolder, palette: Palette = LIGHT) -> bytes | None:
    """A figure of up to four panels; None if the run has no thinking metrics."""
    candidates = (
        (_draw_levels, step_kinds(run) or run.series("thinking/level_1_share")[0]),
        (_draw_level_advantages, any(run.series(f"thinking/advantage_level_{k}")[0] for k in LEVEL_SHADES)),
        (_draw_success, _success_by_tokens(run)[0]),
    )
    panels: list[DrawPanel] = [draw for draw, wanted in candidates if wanted]
    panels += [_draw_lambdas] if panels and lambda_metrics(run) else []
    return _draw_row(run, palette, panels, wspace=0.25)


def _draw_row(run: RunFolder, palette: Palette, panels: Sequence[DrawPanel], wspace: float) -> bytes | None:
    if not panels:
        return None
    return draw_panels(
        new_figure(palette, (1200, 520)),
        run,
        palette,
        panels,
        left=0.05,
        right=0.98,
        top=0.78,
        bottom=0.14,
        wspace=wspace,
    )


def budget_units(names: Collection[str]) -> list[str]:
    """Units that have a budget, such as cost."""
    parts = [name.split("/") for name in sorted(names)]
    return [part[1] for part in parts if len(part) == 3 and (part[0], part[2]) == ("router", "budget")]


def logged_routes(run: RunFolder) -> list[str]:
    """Known routes in their usual order, then any others."""
    routes = {name.removeprefix(_SHARE_PREFIX) for name in run.metric_names if name.startswith(_SHARE_PREFIX)}
    return [*(route for route in ROUTE_LABELS if route in routes), *sorted(routes - set(ROUTE_LABELS))]


def step_kinds(run: RunFolder) -> list[str]:
    """Kinds of step that the environment reports."""
    kinds = {name.split("/")[1] for name in run.metric_names if name.startswith("thinking/")}
    return sorted(kind for kind in kinds if run.series(f"thinking/{kind}/level_1_share")[0])


def lambda_metrics(run: RunFolder) -> list[str]:
    """Every λ that was ever above 0, for thinking or tools."""
    return [name for name in sorted(run.metric_names) if name.endswith("/lambda") and any(run.series(name)[1])]


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


def _draw_budget_lambdas(axes: Any, run: RunFolder, palette: Palette) -> None:
    units = budget_units(run.metric_names)
    for unit, line in zip(units, _LINE_STYLES, strict=False):
        label = "λ" if len(units) == 1 else f"λ, {unit}"
        axes.plot(*run.series(f"router/{unit}/lambda"), color=palette.after, linestyle=line, linewidth=2, label=label)
    axes.set_ylim(bottom=0)
    label_step_axes(axes, "λ, the cost of a call", palette)


def _draw_routes(axes: Any, run: RunFolder, palette: Palette) -> None:
    routes = logged_routes(run)
    steps, values = shared_steps([run.series(f"{_SHARE_PREFIX}{route}") for route in routes])
    areas = axes.stackplot(steps, *values, labels=[ROUTE_LABELS.get(route, route.lower()) for route in routes])
    for area, shade in zip(areas, cycle(_ROUTE_SHADES), strict=False):
        area.set(facecolor=palette.after, alpha=shade, edgecolor=palette.paper)
    label_step_axes(axes, "routes", palette, share=True)
    axes.set_ylim(0, 1)


def _draw_levels(axes: Any, run: RunFolder, palette: Palette) -> None:
    """Share of levels 3 and 4 by kind of step: does deep thinking go where it is needed?"""
    for kind, line in zip(step_kinds(run) or [""], _LINE_STYLES, strict=False):
        prefix = f"thinking/{kind}/" if kind else "thinking/"
        steps, shares = shared_steps([run.series(f"{prefix}level_{k}_share") for k in (3, 4)])
        deep = [sum(values) for values in zip(*shares, strict=True)]
        axes.plot(steps, deep, color=palette.after, linestyle=line, linewidth=1.8, label=kind or "all steps")
    label_step_axes(axes, "share of levels 3 and 4", palette, share=True)


def _draw_level_advantages(axes: Any, run: RunFolder, palette: Palette) -> None:
    for level, shade in LEVEL_SHADES.items():
        if (series := run.series(f"thinking/advantage_level_{level}"))[0]:
            axes.plot(*series, color=palette.after, alpha=shade, linewidth=1.6, label=str(level))
    axes.axhline(0.0, color=palette.rule, linewidth=1.0)
    label_step_axes(axes, "advantage of each level", palette)


def _draw_success(axes: Any, run: RunFolder, palette: Palette) -> None:
    tokens, scores = _success_by_tokens(run)
    axes.plot(tokens, scores, color=palette.cost, linewidth=1.0, alpha=0.4)
    axes.scatter(tokens, scores, color=palette.cost, s=14, zorder=3)
    axes.scatter(tokens[-1:], scores[-1:], color=palette.cost, s=60, zorder=4, label="last")
    draw_title(axes, "score against thinking tokens per step", palette)
    axes.legend(frameon=False, labelcolor=palette.muted, fontsize=9)


def _draw_lambdas(axes: Any, run: RunFolder, palette: Palette) -> None:
    for name, line in zip(lambda_metrics(run), _LINE_STYLES, strict=False):
        axes.plot(
            *run.series(name), color=palette.cost, linestyle=line, linewidth=1.6, label=name.removesuffix("/lambda")
        )
    label_step_axes(axes, "dual variables λ", palette)


def _success_by_tokens(run: RunFolder) -> tuple[list[float], list[float]]:
    """(thinking tokens, scores) of validations if there are any, else of training steps."""
    for prefix, score in (("eval/", "eval/score"), ("", "score/mean")):
        steps, (tokens, scores) = shared_steps([run.series(f"{prefix}thinking/tokens_per_step"), run.series(score)])
        if steps:
            return tokens, scores
    return [], []
