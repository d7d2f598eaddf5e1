"""`toolwise score`: a run's stored rollouts, scored again after a fix to a reward."""

from __future__ import annotations

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
    run: Annotated[Path, typer.Argument(help="A run, or a file of stored rollouts.", show_default=False)],
    reward: Annotated[
        str | None, typer.Option(metavar="REF", help="path.py:function or module:function. [default: the run's own]")
    ] = None,
    kwargs: KwargsOption = None,
    step: Annotated[int | None, typer.Option(min=0, help="Only the rollouts of one step.")] = None,
    validation: Annotated[bool, typer.Option("--validation", help="Those of validation instead of training.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="The new JSONL file. [default: beside the old ones]", show_default=False)
    ] = None,
    tier: TierOption = None,
    timeout_s: TimeoutOption = None,
    memory_mb: MemoryOption = None,
    read: ReadOption = None,
    allow: AllowOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Score a run's stored rollouts again, in the sandbox, and show what changed. The old files stay as they are."""

    from toolwise.checks.reward.rescore import load_run_reward, rescore, unused_path, write_rescored
    from toolwise.checks.reward.stored_rollouts import read_rollouts

    config = load_run_reward(run, reward, read_kwargs(kwargs))
    sandbox = override_sandbox(config.sandbox, tier, timeout_s, memory_mb, read, allow)
    config = config.model_copy(update={"sandbox": sandbox})
    if out is not None:
        unused_path(run, "", out)  # refused before the work, not after it
    found, rows = rescore(config, read_rollouts(run, step=step, validation=validation))
    path = unused_path(run, found.reward, out)
    write_rescored(path, rows)
    if as_json:
        print_json({**found.to_json(), "out": str(path)})
    else:
        _show(found)
        print_line(f"wrote {len(rows):,} rollouts to {path}")


def _show(found: RescoreReport) -> None:
    from rich.table import Table

    from toolwise.terminal.display import Console

    console = Console()
    table = Table(title=f"{found.reward} on {found.rollouts} stored rollouts")
    for column in ("", "then", "now"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("mean score", _number(found.old_mean), _number(found.new_mean))
    for kind in sorted({*found.old_errors, *found.new_errors}):
        table.add_row(f"{kind} errors", str(found.old_errors.get(kind, 0)), str(found.new_errors.get(kind, 0)))
    console.print(table)
    print_line(
        f"{found.changed} of {found.rollouts} rollouts have another score; correlation {_number(found.correlation)}"
    )
    print_line(f"{found.pairs_turned} of {found.pairs} pairs within a group stand the other way round")
    if found.not_tried:
        print_line(f"{found.not_tried} rollouts were not tried after too many timeouts")
    for moved in found.largest:
        print_line(f"  {moved['rollout_id']}: {moved['old']:g} → {moved['new']:g}")


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
