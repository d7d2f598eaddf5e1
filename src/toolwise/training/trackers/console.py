"""Shows a run's progress: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from itertools import cycle, pairwise
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from toolwise.protocols import Callback, Tracker
from toolwise.routing.delivered_budget import format_cost
from toolwise.terminal import write_line
from toolwise.terminal.display import Console, Live
from toolwise.training.metrics import budget_unit
from toolwise.training.records import RolloutRecord
from toolwise.training.trackers.conversation import clean_text, conversation_turns, shorten
from toolwise.types import StepEvent

DISPLAYED_METRICS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("loss", ("loss",), ("eval/loss",)),
    ("score", ("router/r_task", "score/mean"), ("eval/score",)),
    ("correct", ("correct/mean", "reward/correct/mean"), ("eval/correct",)),
    ("cost", ("router/UNIT/mean", "cost/mean"), ("eval/cost",)),
    ("λ", ("router/UNIT/lambda",), ()),
    ("entropy", ("actor/entropy",), ()),
    ("tokens/s", ("time/tokens_per_s",), ()),
)
"""(name, metrics of a training step, metrics of a validation); the first metric present is shown. UNIT is that of
the first budget. A router explores routes that its policy would not take, so the policy's own score and cost precede
the means of all rollouts."""

MIN_PANEL_S = 4.0
"""Minimum time a rollout stays on the live display, so that it can be read."""

ROUTE_LABELS = {"ANSWER": "answer", "SEARCH-FAMILY": "search", "CALCULATE-FAMILY": "calculate"}
_ROUTE_STYLES = ("green", "cyan", "yellow", "magenta")
_STYLES = {"user": "bold", "call": "cyan", "result": "dim", "assistant": "", "system": "dim"}


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """A bar chart of `values` in at most `width` characters, each the mean of its interval."""
    values = [v for v in values if math.isfinite(v)]
    if not values:
        return ""
    n = min(width, len(values))
    edges = (round(i * len(values) / n) for i in range(n + 1))
    means = [math.fsum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * (m - low) / span)) if span > 0 else 3] for m in means)


def format_metric(name: str, value: float | None) -> str:
    """Format a metric: shares as percentages, token counts and speeds as integers."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "–"
    if name == "correct":
        return f"{100 * value:.1f}%"
    if name in ("cost", "λ"):
        return format_cost(value)
    return f"{value:,.0f}" if name in ("tokens/s", "tokens") else f"{value:.3f}"


def format_duration(seconds: float) -> str:
    minutes, s = divmod(round(max(0.0, seconds)), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}h{m:02}m" if hours else f"{m}m{s:02}s" if m else f"{s}s"


def route_shares(metrics: Mapping[str, float]) -> dict[str, float]:
    """route -> the share the policy gives it; empty without a router."""
    prefix = "router/share/"
    shares = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
    return {ROUTE_LABELS.get(name, name.lower()): share for name, share in shares.items() if math.isfinite(share)}


def share_bar(shares: Mapping[str, float], width: int = 40) -> Text:
    """The shares as one bar, `width` characters long, followed by their names in the same colors."""
    bar, names, values = Text(), Text(), list(shares.values())
    total = math.fsum(values) or 1.0
    edges = [round(width * math.fsum(values[:i]) / total) for i in range(len(values) + 1)]
    for (before, after), (name, share), style in zip(
        pairwise(edges), shares.items(), cycle(_ROUTE_STYLES), strict=False
    ):
        bar.append("█" * (after - before), style=style)
        names.append(f"  {name} {share:.0%}", style=style)
    return bar + names


class ConsoleTracker(Tracker, Callback):
    """Shows a run's progress. Model output is shown as plain text, without markup or control characters."""

    def __init__(
        self,
        total_steps: int,
        *,
        title: str,
        console: Console | None = None,
        every_s: float = 5.0,
        rollout_every_s: float = 60.0,
    ) -> None:
        """`every_s` and `rollout_every_s` are minimum intervals between plain lines, so that logs are not flooded."""
        self._console = console or Console()
        self._total = max(1, total_steps)
        self._title = clean_text(title)
        self._every_s, self._rollout_every_s = every_s, rollout_every_s
        self._step = 0
        self._began = time.monotonic()
        self._step_times: list[tuple[float, int]] = []
        self._training: dict[str, list[float]] = {name: [] for name, _, _ in DISPLAYED_METRICS}
        self._validation: dict[str, list[float]] = {name: [] for name, _, _ in DISPLAYED_METRICS}
        self._routes: dict[str, float] = {}
        self._budget: float | None = None
        self._unit = "cost"
        self._rollout_panels: list[tuple[float, RenderableType]] = []
        self._printed_at = self._rollout_at = -math.inf
        self._live: Live | None = None
        if _is_live_terminal(self._console):
            self._live = Live(console=self._console, refresh_per_second=2, get_renderable=self._display)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = max(self._step, step)
        evaluated = any(name.startswith("eval/") for name in metrics)
        self._routes = route_shares(metrics) or self._routes
        self._unit = budget_unit(metrics) or self._unit
        self._budget = metrics.get(f"router/{self._unit}/budget", self._budget)
        for histories, of_validation in ((self._training, False), (self._validation, True)):
            for name, value in self._displayed_values(metrics, evaluated=of_validation).items():
                histories[name].append(value)
        if not evaluated:
            self._step_times = [*self._step_times[-19:], (time.monotonic(), step)]
        if self._live is not None:
            self._refresh()
        elif evaluated or step >= self._total or time.monotonic() - self._printed_at >= self._every_s:
            self._printed_at = time.monotonic()
            self._print(self._plain_line(step, metrics, evaluated))

    def on_step(self, event: StepEvent) -> None:
        for scored in event.rollouts[:1]:
            self.show_rollout(RolloutRecord.of(scored))

    def show_rollout(self, record: RolloutRecord) -> None:
        now = time.monotonic()
        if self._live is not None:
            if len(self._rollout_panels) < 2 or now - self._rollout_panels[-1][0] >= MIN_PANEL_S:
                self._rollout_panels = [*self._rollout_panels[-1:], (now, _rollout_panel(record))]
                self._refresh()
        elif now - self._rollout_at >= self._rollout_every_s:
            self._rollout_at = now
            self._print(f"  rollout: {_rollout_head(record)}")
            for label, text, _ in rollout_lines(record, 200):
                self._print(f"    {label:<8}{text}")

    def note(self, text: str) -> None:
        """Print a line above the display."""
        if self._live is not None:
            self._console.print(Text(clean_text(text)))
        else:
            self._print(clean_text(text))

    def warn(self, title: str, lines: Sequence[str]) -> None:
        """Show an important warning: a panel above the display, or plain lines."""
        if self._live is not None:
            body = Text("\n".join(map(clean_text, lines)))
            self._console.print(Panel(body, title=Text(title), title_align="left", border_style="yellow"))
        else:
            for line in (f"WARNING {title}", *(f"  {line}" for line in lines)):
                self._print(clean_text(line))

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _refresh(self) -> None:
        # Started on the first update, so that an earlier failure leaves no half-drawn display.
        assert self._live is not None
        if not self._live.is_started:
            self._live.start()
        self._live.refresh()

    def _seconds_left(self) -> float | None:
        if not self._step_times or self._step_times[-1][1] <= self._step_times[0][1]:
            return None
        (t0, s0), (t1, s1) = self._step_times[0], self._step_times[-1]
        return max(0.0, (t1 - t0) / (s1 - s0) * (self._total - s1) - (time.monotonic() - t1))

    def _plain_line(self, step: int, metrics: Mapping[str, float], evaluated: bool) -> str:
        parts = [f"step {step}/{self._total}", *(["validation"] if evaluated else [])]
        values = self._displayed_values(metrics, evaluated=evaluated)
        parts += [f"{name} {self._format_value(name, value)}" for name, value in values.items()]
        parts += [f"faults {faults:.0f}"] if (faults := metrics.get("faults/rollouts")) else []
        parts.append(" ".join(f"{route} {share:.0%}" for route, share in route_shares(metrics).items()))
        if (left := self._seconds_left()) is not None and not evaluated and step < self._total:
            parts.append(f"{format_duration(left)} left")
        return "  ".join(filter(None, parts))

    def _displayed_values(self, metrics: Mapping[str, Any], *, evaluated: bool) -> dict[str, float]:
        return displayed_values(metrics, evaluated=evaluated, unit=self._unit)

    def _format_value(self, name: str, value: float) -> str:
        within = f" of {self._budget:g}" if name == "cost" and self._budget is not None else ""
        return format_metric(name, value) + within

    def _print(self, line: str) -> None:
        """Print to the console's stream; a closed pipe does not end the run."""
        write_line(self._console.file, line)

    def _display(self) -> RenderableType:
        routes = [Text("routes   ", style="dim") + share_bar(self._routes)] if self._routes else []
        panels = [panel for _, panel in self._rollout_panels]
        if panels and self._console.width >= 110:
            side_by_side = Table.grid(expand=True, padding=(0, 1))
            for _ in panels:
                side_by_side.add_column(ratio=1)
            side_by_side.add_row(*panels)
            panels = [side_by_side]
        return Group(self._header(), self._table(), *routes, *panels[-1:])

    def _header(self) -> RenderableType:
        clock = f"{self._step}/{self._total}  {format_duration(time.monotonic() - self._began)}"
        if (left := self._seconds_left()) is not None and self._step < self._total:
            clock += f"  about {format_duration(left)} left"
        row = Table.grid(expand=True, padding=(0, 2))
        row.add_column(no_wrap=True, overflow="crop")
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        bar = ProgressBar(self._total, min(self._step, self._total), complete_style="cyan", finished_style="green")
        row.add_row(Text(self._title, style="bold"), bar, Text(clock, style="dim"))
        return row

    def _table(self) -> RenderableType:
        table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim", show_edge=False)
        for column in ("", "training", "trend", "validation"):
            table.add_column(column, justify="right" if column == "training" else "left")
        for name, _, _ in DISPLAYED_METRICS:
            training, validation = list(self._training[name]), list(self._validation[name])
            if not training and not validation:
                continue
            table.add_row(
                Text(name, style="dim"),
                Text(self._format_value(name, training[-1]) if training else "–", style="bold"),
                Text(sparkline(training), style="cyan"),
                Text(" → ".join(format_metric(name, value) for value in (*validation[:1], *validation[1:][-1:]))),
            )
        return table


def _is_live_terminal(console: Console) -> bool:
    """Checks the stream itself: with FORCE_COLOR, rich treats any stream as a terminal and fills logs with escapes."""
    encoding = (getattr(console.file, "encoding", None) or "").lower().replace("-", "")
    try:
        return console.file.isatty() and encoding == "utf8" and not console.is_dumb_terminal
    except ValueError:
        return False


def displayed_values(metrics: Mapping[str, Any], *, evaluated: bool, unit: str) -> dict[str, float]:
    """The displayed metrics of a training step, or of a validation."""
    values: dict[str, float] = {}
    for name, training, validation in DISPLAYED_METRICS:
        if name == "correct" and not evaluated and "router/r_task" in metrics:
            continue  # with a router only its policy's own values count, and those lack `correct`
        for metric in validation if evaluated else training:
            if (value := metrics.get(metric.replace("UNIT", unit))) is not None and math.isfinite(value):
                values.setdefault(name, float(value))
    return values


def show_record(console: Console, record: RolloutRecord) -> None:
    console.print(_rollout_panel(record))


def _rollout_head(record: RolloutRecord) -> str:
    mark = {True: "✓ ", False: "✗ ", None: ""}[record.correct]
    parts = [f"{mark}score {format_metric('score', record.score)}"]
    parts += [f"cost {record.cost:g}"] if record.cost is not None else []
    parts += [clean_text(text) for text in (record.kind, record.stop_reason) if text]
    return " · ".join(shorten(part, 40) for part in parts)


def rollout_lines(record: RolloutRecord, limit: int) -> list[tuple[str, str, str]]:
    """(label, line, style) per turn, without the system prompt and the middle of long conversations."""
    labels = {"assistant": "says", "result": "gets", "call": "calls", "user": "user"}
    turns = conversation_turns(record.messages)
    lines = [(labels[t.kind], shorten(t.text, limit), _STYLES[t.kind]) for t in turns if t.kind != "system"]
    if len(lines) <= 8:
        return lines
    return [*lines[:4], ("", f"… {len(lines) - 8} more …", "dim"), *lines[-4:]]


def _rollout_panel(record: RolloutRecord) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text, style in rollout_lines(record, 220):
        grid.add_row(Text(label, style="dim"), Text(text, style=style))
    colour = {True: "green", False: "red", None: "blue"}[record.correct]
    return Panel(grid, title=Text(_rollout_head(record), style=colour), title_align="left", border_style=colour)
