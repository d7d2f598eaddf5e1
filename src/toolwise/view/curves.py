"""Plots of runs: share correct and cost over steps, and the gain per kind of task; the losses of an SFT run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from toolwise.training.metrics import budget_unit
from toolwise.training.run_folder import RunFolder, Series
from toolwise.training.trackers.conversation import clean_text, shorten
from toolwise.view.comparison import headline, rows_by_kind

DPI = 110
MAX_KINDS = 8
POLICY_REWARD = "router/r_task"
"""Task reward of the router's policy, weighted by its route probabilities."""


@dataclass(frozen=True, slots=True)
class Palette:
    """Colours of a plot: greys, and one colour each for results and cost."""

    paper: str
    ink: str
    muted: str
    rule: str
    before: str
    after: str
    cost: str


LIGHT = Palette("#ffffff", "#1f2933", "#66727f", "#e4e7eb", "#b9c3cd", "#1f6f8b", "#b8622b")
DARK = Palette("#171b21", "#e6eaee", "#97a3af", "#2c333b", "#5b6672", "#5bb3cf", "#dd9159")


DrawPanel = Callable[[Any, RunFolder, Palette], None]


def render_curves(run: RunFolder, palette: Palette = LIGHT) -> bytes:
    """Plot one run: share correct (or score), cost, before and after by kind."""
    candidates = (
        (_draw_loss, run.series("loss")[0]),
        (_draw_speed, run.series("loss")[0]),
        (_draw_measure, _main_metric(run)),
        (_draw_cost, run.series("cost/mean")[0] or run.series("eval/cost")[0]),
        (_draw_kinds, run.kinds),
    )
    panels: list[DrawPanel] = [draw for draw, wanted in candidates if wanted]
    figure = new_figure(palette, (1200, 700))
    figure.text(0.06, 0.955, _escape_dollars(run.name), color=palette.ink, fontsize=14, fontweight="bold", va="center")
    figure.text(0.06, 0.908, _headline_text(run), color=palette.muted, fontsize=10, va="center")
    if not panels:
        figure.text(0.5, 0.5, "nothing logged yet", color=palette.muted, ha="center", fontsize=12)
        return to_png(figure)
    return draw_panels(figure, run, palette, panels, left=0.06, right=0.975, top=0.775, bottom=0.11, wspace=0.2)


def draw_panels(figure: Any, run: RunFolder, palette: Palette, panels: Sequence[DrawPanel], **layout: float) -> bytes:
    """Draw `panels` side by side."""
    grid = figure.add_gridspec(1, len(panels), **layout)
    for column, draw in enumerate(panels):
        axes = figure.add_subplot(grid[0, column])
        style_axes(axes, palette)
        draw(axes, run, palette)
    return to_png(figure)


def _main_metric(run: RunFolder) -> str | None:
    logged = (name for name in ("correct", "score") if run.series(*_metric_names(name), f"eval/{name}")[0])
    return next(logged, None)


def _metric_names(name: str) -> tuple[str, ...]:
    return (f"{name}/mean", f"reward/{name}/mean")


def _draw_measure(axes: Any, run: RunFolder, palette: Palette) -> None:
    name = _main_metric(run) or "score"
    training, label = run.series(*_metric_names(name)), "training"
    if run.series(POLICY_REWARD)[0]:  # a routed run also samples routes its policy would rarely choose
        training, label = run.series(POLICY_REWARD), "training reward"
    _draw_series(axes, training, run.series(f"eval/{name}"), palette.after, label)
    label_step_axes(axes, _metric_label(name), palette, share=name == "correct")


def _draw_loss(axes: Any, run: RunFolder, palette: Palette) -> None:
    held_out = run.series("eval/loss")
    _draw_series(axes, run.series("loss"), held_out, palette.after, held_out_label="held-out conversations")
    label_step_axes(axes, "loss per assistant token", palette)


def _draw_speed(axes: Any, run: RunFolder, palette: Palette) -> None:
    _draw_series(axes, run.series("time/tokens_per_s"), ([], []), palette.cost)
    axes.set_ylim(bottom=0)
    label_step_axes(axes, "tokens per second", palette)


def _draw_cost(axes: Any, run: RunFolder, palette: Palette) -> None:
    unit = next((unit for line in run.metrics if (unit := budget_unit(line)) is not None), "cost")
    _draw_series(axes, run.series(f"router/{unit}/mean", "cost/mean"), run.series("eval/cost"), palette.cost)
    if (limit := run.series(f"router/{unit}/budget"))[0]:
        axes.plot(*limit, color=palette.ink, linewidth=1.1, linestyle="--", label="budget")
    axes.set_ylim(bottom=0)
    label_step_axes(axes, "cost of tools, per task", palette)


def _draw_series(
    axes: Any,
    training: Series,
    validation: Series,
    colour: str,
    label: str = "training",
    held_out_label: str = "held-out tasks",
) -> None:
    steps, values = training
    if steps:
        axes.plot(steps, values, color=colour, alpha=0.28, linewidth=1.1, label=label, zorder=2)
        if len(values) >= 20:
            axes.plot(steps, _smooth(values), color=colour, alpha=0.55, linewidth=1.4, zorder=2)
    if validation[0]:
        axes.plot(
            *validation,
            color=colour,
            linewidth=2.2,
            marker="o",
            markersize=6,
            label=held_out_label,
            zorder=3,
        )


def _draw_kinds(axes: Any, run: RunFolder, palette: Palette) -> None:
    rows = rows_by_kind(run.summary)[1:]
    shown = sorted(rows, key=lambda row: -(row.n or 0))[:MAX_KINDS] if len(rows) > MAX_KINDS else rows
    named: set[str] = set()
    for index, row in enumerate(shown):
        change = row.changes[0]
        label = _escape_dollars(shorten(row.label.replace("_", " "), 36))
        axes.text(0, index - 0.34, label, va="center", color=palette.ink, fontsize=9.5)
        after = "after" if run.finished else f"step {(run.summary.get('after') or {}).get('step', '?')}"
        bars = (("before", change.before, palette.before, -0.1), (after, change.after, palette.after, 0.18))
        for side, value, colour, offset in bars:
            if value is not None:
                axes.barh(index + offset, value, 0.26, color=colour, label=None if side in named else side, zorder=2)
                named.add(side)
                axes.text(
                    value + 0.015, index + offset, f"{100 * value:.0f}%", va="center", color=palette.ink, fontsize=8.5
                )
    axes.set(ylim=(max(3, len(shown)) - 0.5, -0.5), yticks=[], xlim=(0, 1.14))
    axes.set_xticks([0, 0.5, 1], ["0%", "50%", "100%"])
    axes.grid(True, axis="x", color=palette.rule, linewidth=0.8)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="x", length=0)
    suffix = f" ({len(shown)} of {len(rows)})" if len(shown) < len(rows) else ""
    draw_title(axes, f"share correct by kind{suffix}", palette)
    draw_legend(axes, palette)


def _headline_text(run: RunFolder) -> str:
    texts = [
        f"{change.name} {change.before_text} → {change.after_text}"
        if change.after is not None
        else f"{change.name} {change.before_text} before training"
        for change in headline(run.summary)
        if change.name != "tokens"
    ]
    return "     ".join(texts) + ("" if run.finished else "     (run not finished)")


def _metric_label(name: str) -> str:
    return "share correct" if name == "correct" else name


def _escape_dollars(text: str) -> str:
    """matplotlib parses text between dollar signs as math."""
    return clean_text(text).replace("$", r"\$")


def _smooth(values: Sequence[float]) -> list[float]:
    """Centred moving average over about a twelfth of the run."""
    half = max(1, len(values) // 24)
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def new_figure(palette: Palette, size_px: tuple[int, int]) -> Any:
    # A bare Figure instead of pyplot: no global state, no window, safe in any thread.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size_px[0] / DPI, size_px[1] / DPI), dpi=DPI, facecolor=palette.paper)
    FigureCanvasAgg(figure)
    return figure


def style_axes(axes: Any, palette: Palette) -> None:
    axes.set(facecolor=palette.paper, axisbelow=True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(palette.rule)
    axes.tick_params(colors=palette.muted, labelsize=9, length=3)
    axes.grid(True, axis="y", color=palette.rule, linewidth=0.8)


def draw_title(axes: Any, text: str, palette: Palette, *, legend_rows: int = 1) -> None:
    axes.set_title(text, loc="left", color=palette.ink, fontsize=11, pad=11 + 15 * legend_rows)


def label_step_axes(axes: Any, title: str, palette: Palette, *, share: bool = False) -> None:
    """Finish a plot over training steps; `share`: its values are percentages."""
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    draw_title(axes, title, palette)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_xlabel("training step", color=palette.muted, fontsize=9.5)
    axes.margins(x=0.03)
    if share:
        axes.set_ylim(-0.02, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    draw_legend(axes, palette)


def draw_legend(axes: Any, palette: Palette, columns: int = 3) -> None:
    """Between the title and the axes, where it hides no line."""
    if not axes.get_legend_handles_labels()[0]:
        return
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(-0.02, 0.995),
        ncols=columns,
        frameon=False,
        fontsize=9,
        labelcolor=palette.muted,
        handlelength=1.4,
        borderaxespad=0.2,
        columnspacing=1.4,
    )


def to_png(figure: Any) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, facecolor=figure.get_facecolor())
    return buffer.getvalue()
