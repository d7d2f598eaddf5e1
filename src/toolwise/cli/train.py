"""`toolwise train`: a run from a configuration file."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from toolwise.config import RunConfig
    from toolwise.training import RunResult

Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override a setting; may be given again.")
]


def train(
    config: Annotated[Path, typer.Argument(help="A TOML or YAML file.", show_default=False)],
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder. [default: runs/NAME-TIME]", show_default=False)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in --out.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check everything, show the resolved configuration, train nothing."),
    ] = False,
) -> None:
    """Train as a configuration file says."""
    from toolwise.config import load_config
    from toolwise.errors import ConfigError

    if resume and out is None:
        raise ConfigError("--resume needs --out DIR: the folder of the run to go on with")
    found = load_config(config, overrides or [])
    if dry_run:
        check(found, out, resume)
    else:
        from toolwise.api import new_folder

        go(found, out or new_folder(found.name), resume)


def check(config: RunConfig, out: Path | None, resume: bool) -> None:
    """Everything that a run would check, and the configuration as it would be used."""
    from toolwise.run import assemble, check_learnable
    from toolwise.settings import to_toml
    from toolwise.training import check_folder

    check_learnable(config)
    if out is not None:
        check_folder(out, config, resume=resume)
    run = assemble(config)
    typer.echo(to_toml(config))
    typer.echo(
        f"# {run.batches.batches_per_epoch} batches an epoch, {len(run.validation_tasks)} held-out tasks, "
        f"tools: {', '.join(run.scheduler.tools) or 'none'}; everything checks out"
    )


def go(config: RunConfig, out: Path, resume: bool) -> None:
    """Train and show what came of it; whoever stops a run is told how to go on."""
    from toolwise.api import train

    try:
        result = train(config, out=out, resume=resume)
    except KeyboardInterrupt:
        sys.stdout.flush()
        print(f"toolwise: stopped at once; go on from the last checkpoint with --resume --out {out}", file=sys.stderr)
        os._exit(130)  # an ordinary exit would wait for the model to finish what it is generating
    finish(result)


def finish(result: RunResult) -> None:
    """The before/after table, and where everything is; an interrupted run says how to go on."""
    from rich.console import Console

    from toolwise.view.report import before_after_table

    console = Console()
    summary = result.summary
    if summary["before"] and summary["after"]:
        console.print(before_after_table(summary))
    console.print(
        f"{summary['steps']} steps in {summary['seconds']:.0f} s, peak memory {summary['peak_rss_mb']:.0f} MB"
    )
    for line in (f"  {result.out / 'report.html'}", f"  {result.out / 'report.png'}", f"run folder: {result.out}"):
        typer.echo(line)
    if summary["interrupted"]:
        typer.echo(f"stopped after step {summary['steps']}; go on with --resume --out {result.out}")
        sys.exit(130)
    if summary["updated"] is False:
        sys.exit(3)  # it was meant to train its actor, and has not
