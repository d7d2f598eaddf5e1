"""Plots of thinking: deep levels by kind of step, advantage per level, score against tokens, and λ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toolwise.training.run_folder import RunFolder, Series
from toolwise.view.curves import LIGHT, Palette, draw_title, format_step_axis, new_figure, style_axes, to_png

THINKING_COLUMNS = (
    "thinking/tokens_per_step",
    "thinking/format_valid",
    "thinking/names_action",
    "thinking/alternatives_name_action",
    "thinking/advantage",
    "thinking/failed_alternatives",
    "thinking/added_tokens_ratio",
)
LEVELS = (1, 2, 3, 4)
SHADES = (0.3, 0.5, 0.75, 1.0)
LINE_STYLES = ("-", "--", ":", "-.")


def thinking_columns(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Thinking columns of the training table, including λ for thinking and for tools."""
    names = {name for line in lines for name in line}
    shares = sorted(n for n in names if n.startswith("thinking/") and n.endswith("_share"))
    lambdas = sorted(n for n in names if n.endswith("/lambda"))
    advantages = sorted(n for n in names if n.startswith("thinking/advantage_level_"))
    if not shares:
        return []
    return [*(n for n in THINKING_COLUMNS if n in names), *shares, *advantages, *lambdas]


def render_thinking(run: RunFolder, palette: Palette = LIGHT) -> bytes | None:
    """A figure of up to four panels; None if the run has no thinking metrics."""
    panels: list[Callable[[Any, RunFolder, Palette], None]] = []
    if step_kinds(run) or run.series("thinking/level_1_share")[0]:
        panels.append(_draw_shares)
    if any(run.series(f"thinking/advantage_level_{k}")[0] for k in LEVELS):
        panels.append(_draw_level_advantages)
    if _success_by_tokens(run)[0]:
        panels.append(_draw_success)
    if not panels:
        return None
    if lambda_metrics(run):
        panels.append(_draw_lambdas)
    figure = new_figure(palette, (1200, 520))
    grid = figure.add_gridspec(1, len(panels), left=0.05, right=0.98, top=0.78, bottom=0.14, wspace=0.25)
    for column, draw in enumerate(panels):
        axes = figure.add_subplot(grid[0, column])
        style_axes(axes, palette)
        draw(axes, run, palette)
    return to_png(figure)


def step_kinds(run: RunFolder) -> list[str]:
    """Kinds of step that the environment reports."""
    kinds = {name.split("/")[1] for line in run.metrics for name in line if name.startswith("thinking/")}
    return sorted(kind for kind in kinds if run.series(f"thinking/{kind}/level_1_share")[0])


def lambda_metrics(run: RunFolder) -> list[str]:
    """Every λ that was ever above 0, for thinking or tools."""
    names = sorted({name for line in run.metrics for name in line if name.endswith("/lambda")})
    return [name for name in names if any(run.series(name)[1])]


def _draw_shares(axes: Any, run: RunFolder, palette: Palette) -> None:
    """Share of levels 3 and 4 by kind of step: does deep thinking go where it is needed?"""
    for kind, line in zip(step_kinds(run) or [""], LINE_STYLES, strict=False):
        prefix = f"thinking/{kind}/" if kind else "thinking/"
        deep = _sum([run.series(f"{prefix}level_{k}_share") for k in (3, 4)])
        axes.plot(*deep, color=palette.after, linestyle=line, linewidth=1.8, label=kind or "all steps")
    draw_title(axes, "share of levels 3 and 4", palette)
    format_step_axis(axes, palette, share=True)


def _draw_level_advantages(axes: Any, run: RunFolder, palette: Palette) -> None:
    for level, shade in zip(LEVELS, SHADES, strict=True):
        steps, values = run.series(f"thinking/advantage_level_{level}")
        if steps:
            axes.plot(steps, values, color=palette.after, alpha=shade, linewidth=1.6, label=str(level))
    axes.axhline(0.0, color=palette.rule, linewidth=1.0)
    draw_title(axes, "advantage of each level", palette)
    format_step_axis(axes, palette, share=False)


def _draw_success(axes: Any, run: RunFolder, palette: Palette) -> None:
    tokens, scores = _success_by_tokens(run)
    axes.plot(tokens, scores, color=palette.cost, linewidth=1.0, alpha=0.4)
    axes.scatter(tokens, scores, color=palette.cost, s=14, zorder=3)
    axes.scatter(tokens[-1:], scores[-1:], color=palette.cost, s=60, zorder=4, label="last")
    draw_title(axes, "score against thinking tokens per step", palette)
    axes.legend(frameon=False, labelcolor=palette.muted, fontsize=9)


def _draw_lambdas(axes: Any, run: RunFolder, palette: Palette) -> None:
    for name, line in zip(lambda_metrics(run), LINE_STYLES, strict=False):
        label = name.removesuffix("/lambda")
        axes.plot(*run.series(name), color=palette.cost, linestyle=line, linewidth=1.6, label=label)
    draw_title(axes, "dual variables λ", palette)
    format_step_axis(axes, palette, share=False)


def _success_by_tokens(run: RunFolder) -> tuple[list[float], list[float]]:
    """(thinking tokens, scores) of validations if there are any, else of training steps."""
    for prefix, score in (("eval/", ("eval/score",)), ("", ("score/mean",))):
        tokens, scores = run.series(f"{prefix}thinking/tokens_per_step"), run.series(*score)
        steps = sorted(set(tokens[0]) & set(scores[0]))
        if steps:
            by_step = [dict(zip(*series, strict=True)) for series in (tokens, scores)]
            return [by_step[0][step] for step in steps], [by_step[1][step] for step in steps]
    return [], []


def _sum(series: Sequence[Series]) -> Series:
    """Sum at the steps that all series share."""
    by_step = [dict(zip(*values, strict=True)) for values in series]
    steps = sorted(set.intersection(*(set(values) for values in by_step)))
    return steps, [sum(values[step] for values in by_step) for step in steps]
