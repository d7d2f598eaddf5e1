"""`toolwise score`: a run's stored rollouts, scored again after a fix to a reward."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolwise.cli.reward_options import Allow, Kwargs, Memory, Read, Tier, Timeout, changed_sandbox, read_kwargs
from toolwise.terminal import say, say_json

if TYPE_CHECKING:
    from toolwise.authoring.rescoring import Rescoring


def score(
    run: Annotated[Path, typer.Argument(help="A run, or a file of stored rollouts.", show_default=False)],
    reward: Annotated[
        str | None, typer.Option(metavar="REF", help="path.py:function or module:function. [default: the run's own]")
    ] = None,
    kwargs: Kwargs = None,
    step: Annotated[int | None, typer.Option(min=0, help="Only the rollouts of one step.")] = None,
    validation: Annotated[bool, typer.Option("--validation", help="Those of validation instead of training.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="The new JSONL file. [default: beside the old ones]", show_default=False)
    ] = None,
    tier: Tier = None,
    timeout_s: Timeout = None,
    memory_mb: Memory = None,
    read: Read = None,
    allow: Allow = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Score a run's stored rollouts again, in the sandbox, and show what changed. The old files stay as they are."""

    from toolwise.authoring.rescoring import free_path, rescore, reward_of_run, write_rescored
    from toolwise.authoring.stored import read_stored

    config = reward_of_run(run, reward, read_kwargs(kwargs))
    sandbox = changed_sandbox(config.sandbox, tier, timeout_s, memory_mb, read, allow)
    config = config.model_copy(update={"sandbox": sandbox})
    if out is not None:
        free_path(run, "", out)  # refused before the work, not after it
    found, rows = rescore(config, read_stored(run, step=step, validation=validation))
    path = free_path(run, found.reward, out)
    write_rescored(path, rows)
    if as_json:
        say_json({**found.to_json(), "out": str(path)})
    else:
        _show(found)
        say(f"wrote {len(rows):,} rollouts to {path}")


def _show(found: Rescoring) -> None:
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
    say(f"{found.changed} of {found.rollouts} rollouts have another score; correlation {_number(found.correlation)}")
    say(f"{found.pairs_turned} of {found.pairs} pairs within a group stand the other way round")
    if found.not_tried:
        say(f"{found.not_tried} rollouts were not tried after too many timeouts")
    for moved in found.largest:
        say(f"  {moved['rollout_id']}: {moved['old']:g} → {moved['new']:g}")


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
