"""The report of a run: one self-contained HTML file with metrics, plots and conversations."""

from __future__ import annotations

import base64
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from toolwise.config.secret_names import mask_secrets, secret_keys
from toolwise.protocols import Callback
from toolwise.serialization.files import write_atomic
from toolwise.training.changes import describe_changes
from toolwise.training.fault_rates import describe_totals
from toolwise.training.records import RolloutRecord
from toolwise.training.run_folder import RunFolder, open_run
from toolwise.training.trackers.console import format_duration, format_metric
from toolwise.training.trackers.contained import describe_observer_errors
from toolwise.training.trackers.conversation import Turn, clean_text, conversation_turns, shorten
from toolwise.types import EndEvent
from toolwise.view.comparison import headline, rows_by_kind
from toolwise.view.curves import DARK, LIGHT, Palette, render_curves
from toolwise.view.frontier import frontier_rows, read_frontier, render_frontier
from toolwise.view.routing import render_routing, routing_columns
from toolwise.view.selection import TaskChange, changed_tasks, contrasting_groups, largest_advantage
from toolwise.view.thinking import render_thinking, thinking_columns

if TYPE_CHECKING:
    from rich.table import Table

MAX_TURN_CHARS = 4000
"""Characters shown per turn."""
DIAGNOSIS_FIELDS = ("kind", "cause", "cure", "step")
MAX_TABLE_ROWS = 24
"""Rows of the training table, spread evenly over the run."""

OUTCOME_LABELS = {
    "learned": ("wrong → right", "good"),
    "better": ("score rose", "good"),
    "cheaper": ("right, now cheaper", "good"),
    "lost": ("right → wrong", "bad"),
    "worse": ("score fell", "bad"),
    "still wrong": ("still wrong", "bad"),
    "not repeated": ("before training", "same"),
}
TRAINING_COLUMNS = (
    "score/mean",
    "correct/mean",
    "cost/mean",
    "calls/mean",
    "actor/loss",
    "actor/grad_norm",
    "actor/entropy",
    "actor/clip_frac",
    "frac_zero_std",
    "tokens/sampled",
    "time/tokens_per_s",
    "time/rollout_s",
    "time/update_s",
    "time/step_s",
)


class ReportFiles(Callback):
    """Writes the report when a run ends."""

    def on_end(self, event: EndEvent) -> None:
        write_report(event.run_folder)


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Write report.html and report.png into the run's folder, finished or not; return the path of the HTML file."""
    run = open_run(run_dir)
    light, dark = render_curves(run, LIGHT), render_curves(run, DARK)
    page = _render(run, light, dark)
    out = run.path / "report.html"
    write_atomic(run.path / "report.png", light)
    write_atomic(out, page.encode("utf-8", "replace"))
    return out


def before_after_table(summary: Mapping[str, Any]) -> Table:
    """The same metrics for a terminal: all tasks and each kind, before and after."""
    from rich.table import Table
    from rich.text import Text

    rows = rows_by_kind(summary)
    others = [c for c in headline(summary) if c.name not in {change.name for change in rows[0].changes}]
    caption = "   ".join(f"{c.name} {c.before_text} → {c.after_text}" for c in others)
    table = Table(caption=Text(caption) if caption else None, caption_justify="left")
    table.add_column("tasks")
    table.add_column("n", justify="right")
    for change in rows[0].changes:
        table.add_column(f"{change.name} before", justify="right")
        table.add_column("after", justify="right")
    colours = {"good": "green", "bad": "red", "same": ""}
    for index, row in enumerate(rows):
        cells = [Text(row.label), Text("–" if row.n is None else str(row.n))]
        for change in row.changes:
            cells += [Text(change.before_text), Text(change.after_text, style=colours[change.tone])]
        table.add_row(*cells, style="bold" if index == 0 else "", end_section=index == 0)
    return table


def _render(run: RunFolder, light: bytes, dark: bytes) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    frontier = read_frontier(run)
    return environment.get_template("report.html.j2").render(
        name=clean_text(run.name),
        finished=run.finished,
        after_label=_after_label(run),
        diagnosis=[{key: clean_text(entry.get(key)) for key in DIAGNOSIS_FIELDS} for entry in run.diagnosis],
        never_updated=run.summary.get("updated") is False,
        facts=_facts(run),
        changes=[clean_text(change) for change in describe_changes(run.path)],
        headline=headline(run.summary),
        rows=rows_by_kind(run.summary),
        curves={"light": _data_uri(light), "dark": _data_uri(dark)},
        routing=_pictures(partial(render_routing, run)),
        frontier=frontier and {**frontier_rows(frontier), **(_pictures(partial(render_frontier, frontier)) or {})},
        thinking=_pictures(partial(render_thinking, run)),
        tasks=[_task_view(change) for change in changed_tasks(run.rollouts_before, run.rollouts_after)],
        groups=_group_views(run.latest_training),
        config=clean_text(_without_secrets(run.config_text)) if run.config_text is not None else None,
        table=_training_table(run),
    )


def _without_secrets(config: str) -> str:
    """Mask keys and passwords: reports are shared with others."""
    try:
        table = tomllib.loads(config)
    except (ValueError, RecursionError):
        return config
    return tomli_w.dumps(mask_secrets(table)) if any(secret_keys(table)) else config


def _pictures(render: Callable[[Palette], bytes | None]) -> dict[str, str] | None:
    light, dark = render(LIGHT), render(DARK)
    return {"light": _data_uri(light), "dark": _data_uri(dark)} if light and dark else None


def _after_label(run: RunFolder) -> str:
    if run.finished:
        return "after"
    step = (run.summary.get("after") or {}).get("step")
    return "so far" if step is None else f"at step {step}"


def _facts(run: RunFolder) -> list[str]:
    summary = run.summary
    facts = []
    if summary.get("steps") is not None:
        facts.append(f"{summary['steps']} training step{'' if summary['steps'] == 1 else 's'}")
    if isinstance(summary.get("seconds"), int | float):
        facts.append(format_duration(summary["seconds"]))
    if isinstance(summary.get("peak_rss_mb"), int | float):
        facts.append(f"{summary['peak_rss_mb']:,.0f} MB peak memory")
    if summary.get("seed") is not None:
        facts.append(f"seed {summary['seed']}")
    if failed := describe_totals(summary.get("faults") or {}):
        facts.append(f"faults: {failed}")
    if summary.get("stopped"):
        facts.append(f"stopped: {summary['stopped']}")
    facts += describe_observer_errors(summary.get("observers") or [])
    tasks = (summary.get("before") or {}).get("n")
    if tasks:
        facts.append(f"{tasks} held-out tasks")
    return [clean_text(fact) for fact in facts]


def _task_view(change: TaskChange) -> dict[str, Any]:
    label, tone = OUTCOME_LABELS[change.outcome]
    sides = [_rollout_view(change.before, "before")]
    if change.after is not None:
        sides.append(_rollout_view(change.after, "after"))
    return {
        "question": _question(change.before),
        "kind": clean_text(change.before.kind),
        "truth": shorten(clean_text(change.before.ground_truth), 300),
        "outcome": label,
        "tone": tone,
        "sides": sides,
    }


def _group_views(rollouts: Sequence[RolloutRecord]) -> list[dict[str, Any]]:
    groups = contrasting_groups(rollouts)
    scale = largest_advantage(record for group in groups for record in group)
    return [
        {
            "question": _question(group[0]),
            "sides": [
                _rollout_view(record, name, scale) for record, name in zip(group, ("best", "worst"), strict=True)
            ],
        }
        for group in groups
    ]


def _rollout_view(record: RolloutRecord, title: str, scale: float = 0.0) -> dict[str, Any]:
    turns = conversation_turns(record.messages)
    shades = _turn_shades(turns, [step.advantage for step in record.steps], scale)
    return {
        "title": title,
        "mark": {True: "✓", False: "✗", None: ""}[record.correct],
        "tone": {True: "good", False: "bad", None: "same"}[record.correct],
        "score": format_metric("score", record.score),
        "cost": "–" if record.cost is None else f"{record.cost:g}",
        "stop": clean_text(record.stop_reason),
        "reason": shorten(clean_text(record.reason), 400),
        "turns": [
            {"who": turn.kind, "name": turn.name, "text": _truncate(turn.text), "shade": shade}
            for turn, shade in zip(turns, shades, strict=True)
        ],
    }


def _turn_shades(
    turns: Sequence[Turn], advantages: Sequence[float | None], scale: float
) -> list[dict[str, str] | None]:
    """Colour strength of each turn: its step's advantage relative to the largest on the page.

    Steps are counted from the end, because a prompt may contain assistant messages.
    """
    assistant_turns = max((turn.assistant_index for turn in turns if turn.assistant_index is not None), default=-1) + 1
    shades: list[dict[str, str] | None] = []
    for turn in turns:
        step = -1 if turn.assistant_index is None else turn.assistant_index - (assistant_turns - len(advantages))
        advantage = advantages[step] if 0 <= step < len(advantages) else None
        if scale <= 0 or advantage is None:
            shades.append(None)
        else:
            tone = "good" if advantage >= 0 else "bad"
            shades.append({"tone": tone, "strength": f"{abs(advantage) / scale:.2f}", "said": f"{advantage:+.2f}"})
    return shades


def _training_table(run: RunFolder) -> dict[str, Any]:
    lines = [line for line in run.metrics if any(name in TRAINING_COLUMNS for name in line)]
    names = {name for line in lines for name in line}
    extra = sorted(name for name in names if name.startswith("reward/") and name.endswith("/mean"))
    wanted = dict.fromkeys((*TRAINING_COLUMNS, *extra, *routing_columns(names), *thinking_columns(names)))
    columns = [name for name in wanted if any(line.get(name) is not None for line in lines)]
    if len(lines) > MAX_TABLE_ROWS:
        lines = [lines[round(i * (len(lines) - 1) / (MAX_TABLE_ROWS - 1))] for i in range(MAX_TABLE_ROWS)]
    rows = [[str(line.get("step", "")), *(_cell(line.get(name)) for name in columns)] for line in lines]
    return {"columns": ["step", *columns], "rows": rows}


def _cell(value: Any) -> str:
    if not isinstance(value, int | float):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _question(record: RolloutRecord) -> str:
    questions = [turn.text for turn in conversation_turns(record.messages) if turn.kind == "user"]
    return shorten(questions[0], 140) if questions else clean_text(record.task_id)


def _truncate(text: str) -> str:
    omitted = len(text) - MAX_TURN_CHARS
    return text if omitted <= 0 else f"{text[:MAX_TURN_CHARS]}\n[… {omitted:,} more characters]"


def _data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")
