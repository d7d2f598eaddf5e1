"""`toolwise score`: score a run's stored rollouts again, e.g. after fixing a reward."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolwise.cli.reward_options import (
    AllowOption,
    KwargsOption,
    MemoryOption,
    ReadOption,
    TierOption,
    TimeoutOption,
    override_sandbox,
    read_kwargs,
)
from toolwise.terminal import print_json, print_line

if TYPE_CHECKING:
    from toolwise.checks.reward.rescore import RescoreReport


def score(
    run: Annotated[Path, typer.Argument(help="Run folder, or file of stored rollouts.", show_default=False)],
    reward: Annotated[
        str | None, typer.Option(metavar="REF", help="path.py:function or module:function (default: the run's reward).")
    ] = None,
    kwargs: KwargsOption = None,
    step: Annotated[int | None, typer.Option(min=0, help="Score only the rollouts of this training step.")] = None,
    validation: Annotated[
        bool, typer.Option("--validation", help="Score validation rollouts instead of training rollouts.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Output JSONL file (default: beside the stored rollouts).", show_default=False)
    ] = None,
    tier: TierOption = None,
    timeout_s: TimeoutOption = None,
    memory_mb: MemoryOption = None,
    read: ReadOption = None,
    allow: AllowOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Score a run's stored rollouts again, in the sandbox, and show what changed. Existing files are not modified."""
    from toolwise.checks.reward.rescore import load_run_reward, rescore, unused_path, write_rescored
    from toolwise.checks.reward.stored_rollouts import read_rollouts

    config = load_run_reward(run, reward, read_kwargs(kwargs))
    sandbox = override_sandbox(config.sandbox, tier, timeout_s, memory_mb, read, allow)
    config = config.model_copy(update={"sandbox": sandbox})
    if out is not None:
        unused_path(run, "", out)  # fail before scoring, not after it
    report, rows = rescore(config, read_rollouts(run, step=step, validation=validation))
    path = unused_path(run, report.reward, out)
    write_rescored(path, rows)
    if as_json:
        print_json({**asdict(report), "out": str(path)})
    else:
        _show(report)
        print_line(f"wrote {len(rows):,} rollouts to {path}")


def _show(report: RescoreReport) -> None:
    from rich.table import Table

    from toolwise.terminal.display import Console

    console = Console()
    table = Table(title=f"{report.reward} on {report.rollouts} stored rollouts")
    for column in ("", "before", "now"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("mean score", _number(report.old_mean), _number(report.new_mean))
    for kind in sorted({*report.old_errors, *report.new_errors}):
        table.add_row(f"{kind} errors", str(report.old_errors.get(kind, 0)), str(report.new_errors.get(kind, 0)))
    console.print(table)
    print_line(
        f"{report.changed} of {report.rollouts} rollouts changed score; correlation {_number(report.correlation)}"
    )
    print_line(f"{report.pairs_turned} of {report.pairs} pairs within a group changed order")
    if report.not_tried:
        print_line(f"{report.not_tried} rollouts were skipped after too many timeouts")
    for change in report.largest:
        print_line(f"  {change['rollout_id']}: {change['old']:g} → {change['new']:g}")


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
