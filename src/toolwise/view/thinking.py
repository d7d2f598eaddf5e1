"""Plots of thinking: deep levels by kind of step, advantage per level, score against tokens, and λ."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from toolwise.training.run_folder import RunFolder, shared_steps
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
LEVELS = (1, 2, 3, 4)
SHADES = (0.3, 0.5, 0.75, 1.0)
LINE_STYLES = ("-", "--", ":", "-.")


def thinking_columns(names: Collection[str]) -> list[str]:
    """The thinking metrics among `names`, including λ for thinking and for tools, for the training table."""
    shares = sorted(n for n in names if n.startswith("thinking/") and n.endswith("_share"))
    lambdas = sorted(n for n in names if n.endswith("/lambda"))
    advantages = sorted(n for n in names if n.startswith("thinking/advantage_level_"))
    if not shares:
        return []
    return [*(n for n in THINKING_COLUMNS if n in names), *shares, *advantages, *lambdas]


def render_thinking(run: RunFolder, palette: Palette = LIGHT) -> bytes | None:
    """A figure of up to four panels; None if the run has no thinking metrics."""
    has_levels = any(run.series(f"thinking/advantage_level_{k}")[0] for k in LEVELS)
    candidates = (
        (_draw_shares, step_kinds(run) or run.series("thinking/level_1_share")[0]),
        (_draw_level_advantages, has_levels),
        (_draw_success, _success_by_tokens(run)[0]),
    )
    panels: list[DrawPanel] = [draw for draw, wanted in candidates if wanted]
    if not panels:
        return None
    panels += [_draw_lambdas] if lambda_metrics(run) else []
    figure = new_figure(palette, (1200, 520))
    return draw_panels(figure, run, palette, panels, left=0.05, right=0.98, top=0.78, bottom=0.14, wspace=0.25)


def step_kinds(run: RunFolder) -> list[str]:
    """Kinds of step that the environment reports."""
    kinds = {name.split("/")[1] for name in run.metric_names if name.startswith("thinking/")}
    return sorted(kind for kind in kinds if run.series(f"thinking/{kind}/level_1_share")[0])


def lambda_metrics(run: RunFolder) -> list[str]:
    """Every λ that was ever above 0, for thinking or tools."""
    return [name for name in sorted(run.metric_names) if name.endswith("/lambda") and any(run.series(name)[1])]


def _draw_shares(axes: Any, run: RunFolder, palette: Palette) -> None:
    """Share of levels 3 and 4 by kind of step: does deep thinking go where it is needed?"""
    for kind, line in zip(step_kinds(run) or [""], LINE_STYLES, strict=False):
        prefix = f"thinking/{kind}/" if kind else "thinking/"
        steps, shares = shared_steps([run.series(f"{prefix}level_{k}_share") for k in (3, 4)])
        deep = [sum(values) for values in zip(*shares, strict=True)]
        axes.plot(steps, deep, color=palette.after, linestyle=line, linewidth=1.8, label=kind or "all steps")
    label_step_axes(axes, "share of levels 3 and 4", palette, share=True)


def _draw_level_advantages(axes: Any, run: RunFolder, palette: Palette) -> None:
    for level, shade in zip(LEVELS, SHADES, strict=True):
        steps, values = run.series(f"thinking/advantage_level_{level}")
        if steps:
            axes.plot(steps, values, color=palette.after, alpha=shade, linewidth=1.6, label=str(level))
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
    for name, line in zip(lambda_metrics(run), LINE_STYLES, strict=False):
        label = name.removesuffix("/lambda")
        axes.plot(*run.series(name), color=palette.cost, linestyle=line, linewidth=1.6, label=label)
    label_step_axes(axes, "dual variables λ", palette)


def _success_by_tokens(run: RunFolder) -> tuple[list[float], list[float]]:
    """(thinking tokens, scores) of validations if there are any, else of training steps."""
    for prefix, score in (("eval/", "eval/score"), ("", "score/mean")):
        steps, (tokens, scores) = shared_steps([run.series(f"{prefix}thinking/tokens_per_step"), run.series(score)])
        if steps:
            return tokens, scores
    return [], []
