"""The report of a run: one self-contained HTML file with metrics, plots and conversations."""

from __future__ import annotations

import base64
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from toolwise.config.secret_names import mask_secrets, secret_keys
from toolwise.protocols import Callback
from toolwise.serialization.files import write_atomic
from toolwise.training.changes import describe_changes
from toolwise.training.metrics import describe_totals
from toolwise.training.records import RolloutRecord
from toolwise.training.run_folder import RunFolder, open_run
from toolwise.training.trackers.console import format_duration, format_metric
from toolwise.training.trackers.conversation import Turn, clean_text, conversation_turns, shorten
from toolwise.training.trackers.observers import describe_observer_errors
from toolwise.types import EndEvent
from toolwise.view.comparison import (
    TaskChange,
    changed_tasks,
    contrasting_groups,
    describe_budgets,
    headline,
    largest_advantage,
    rows_by_kind,
)
from toolwise.view.curves import DARK, LIGHT, Palette, render_curves
from toolwise.view.frontier import budget_rows, fixed_rows, read_frontier, render_frontier
from toolwise.view.panels import render_routing, render_thinking, routing_columns, thinking_columns

if TYPE_CHECKING:
    from jinja2 import Template
    from rich.table import Table

MAX_TURN_CHARS = 4000
DIAGNOSIS_FIELDS = ("kind", "severity", "cause", "cure", "step")
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
    "loss",
    "grad_norm",
    "lr",
    "epoch",
    "all_tokens",
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
    def on_end(self, event: EndEvent) -> None:
        write_report(event.run_folder)


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Write report.html and report.png into the run's folder, finished or not; return the path of the HTML file."""
    run = open_run(run_dir)
    light, dark = render_curves(run, LIGHT), render_curves(run, DARK)
    out = run.path / "report.html"
    write_atomic(out, _render(run, light, dark).encode("utf-8", "replace"))
    write_atomic(run.path / "report.png", light)
    return out


def before_after_table(summary: Mapping[str, Any]) -> Table:
    """The same metrics for a terminal: all tasks and each kind, before and after."""
    from rich.table import Column, Table
    from rich.text import Text

    rows = rows_by_kind(summary)
    others = [c for c in headline(summary) if c.name not in {change.name for change in rows[0].changes}]
    caption = "   ".join(f"{c.name} {c.before_text} → {c.after_text}" for c in others)
    numbers = ["n", *(name for change in rows[0].changes for name in (f"{change.name} before", "after"))]
    columns = [Column("tasks"), *(Column(name, justify="right") for name in numbers)]
    table = Table(*columns, caption=Text(caption) if caption else None, caption_justify="left")
    colours = {"good": "green", "bad": "red", "same": ""}
    for index, row in enumerate(rows):
        values = [(Text(c.before_text), Text(c.after_text, style=colours[c.tone])) for c in row.changes]
        cells = [Text(row.label), Text("–" if row.n is None else str(row.n)), *chain.from_iterable(values)]
        table.add_row(*cells, style="bold" if index == 0 else "", end_section=index == 0)
    return table


@cache
def _template() -> Template:
    """Compiled once per process: that takes longer than rendering it."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2")


def _render(run: RunFolder, light: bytes, dark: bytes) -> str:
    frontier = read_frontier(run)
    return _template().render(
        name=clean_text(run.name),
        finished=run.finished,
        after_label=_after_label(run),
        diagnosis=[_finding_view(entry) for entry in run.diagnosis],
        never_updated=run.summary.get("updated") is False,
        facts=_facts(run),
        changes=[clean_text(change) for change in describe_changes(run.path)],
        headline=headline(run.summary),
        rows=rows_by_kind(run.summary),
        curves={"light": _data_uri(light), "dark": _data_uri(dark)},
        routing=_pictures(partial(render_routing, run)),
        frontier=frontier
        and {
            "rows": frontier["rows"],
            "draws": frontier["draws"],
            "held": budget_rows(frontier),
            "fixed": fixed_rows(frontier),
            **(_pictures(partial(render_frontier, frontier)) or {}),
        },
        thinking=_pictures(partial(render_thinking, run)),
        tasks=[_task_view(change) for change in changed_tasks(run.rollouts_before, run.rollouts_after)],
        groups=_group_views(run.latest_training),
        config=clean_text(_without_secrets(run.config_text)) if run.config_text is not None else None,
        table=_training_table(run),
    )


def _finding_view(entry: Mapping[str, Any]) -> dict[str, str]:
    """A finding, whose evidence older runs lack."""
    from toolwise.training.diagnosis.evidence import pages  # imports torch
    from toolwise.training.diagnosis.monitor import finding_from_json

    evidence = entry.get("evidence")
    evidence = evidence if isinstance(evidence, dict) else {}
    steps, rollouts = (evidence.get(name) or [] for name in ("steps", "rollouts"))
    shown = [f"steps {steps[0]} to {steps[-1]}"] if steps and steps[0] != steps[-1] else []
    shown += [f"rollouts {', '.join(map(str, rollouts))}"] if rollouts else []
    if shown:
        with suppress(TypeError, ValueError):  # of another version
            shown += [f"in toolwise view at {link}" for link in pages(finding_from_json(entry))[:1]]
    fields = {key: clean_text(entry.get(key)) for key in DIAGNOSIS_FIELDS}
    return fields | {"evidence": clean_text("; ".join(shown))}


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
    steps, seconds, memory = (summary.get(name) for name in ("steps", "seconds", "peak_rss_mb"))
    faults, tasks = describe_totals(summary.get("faults") or {}), (summary.get("before") or {}).get("n")
    unscored = [
        f"{count} {side}" for side in ("before", "after") if (count := (summary.get(side) or {}).get("invalid"))
    ]
    facts = [
        f"{steps} training step{'' if steps == 1 else 's'}" if steps is not None else "",
        format_duration(seconds) if isinstance(seconds, int | float) else "",
        f"{memory:,.0f} MB peak memory" if isinstance(memory, int | float) else "",
        f"seed {summary['seed']}" if summary.get("seed") is not None else "",
        f"faults: {faults}" if faults else "",
        f"stopped: {summary['stopped']}" if summary.get("stopped") else "",
        *describe_observer_errors(summary.get("observers") or []),
        f"{tasks} held-out tasks" if tasks else "",
        f"held-out tasks without a valid score: {', '.join(unscored)}" if unscored else "",
        *describe_budgets(summary),
    ]
    return [clean_text(fact) for fact in facts if fact]


def _task_view(change: TaskChange) -> dict[str, Any]:
    label, tone = OUTCOME_LABELS[change.outcome]
    sides = (("before", change.before), ("after", change.after))
    return {
        "question": _question(change.before),
        "kind": clean_text(change.before.kind),
        "truth": shorten(clean_text(change.before.ground_truth), 300),
        "outcome": label,
        "tone": tone,
        "sides": [_rollout_view(record, side) for side, record in sides if record is not None],
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
    first = assistant_turns - len(advantages)
    steps = [-1 if turn.assistant_index is None else turn.assistant_index - first for turn in turns]
    shaded = [advantages[step] if 0 <= step < len(advantages) and scale > 0 else None for step in steps]
    return [
        {"tone": "good" if a >= 0 else "bad", "strength": f"{abs(a) / scale:.2f}", "said": f"{a:+.2f}"}
        if a is not None
        else None
        for a in shaded
    ]


def _training_table(run: RunFolder) -> dict[str, Any]:
    lines = [line for line in run.metrics if any(name in TRAINING_COLUMNS for name in line)]
    names = {name for line in lines for name in line}
    extra = sorted(name for name in names if name.startswith("reward/") and name.endswith("/mean"))
    wanted = dict.fromkeys((*TRAINING_COLUMNS, *extra, *routing_columns(names), *thinking_columns(names)))
    columns = [name for name in wanted if any(line.get(name) is not None for line in lines)]
    if len(lines) > MAX_TABLE_ROWS:
        lines = [lines[round(i * (len(lines) - 1) / (MAX_TABLE_ROWS - 1))] for i in range(MAX_TABLE_ROWS)]
    return {
        "columns": ["step", *columns],
        "rows": [[str(line.get("step", "")), *(_cell(line.get(name)) for name in columns)] for line in lines],
    }


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
