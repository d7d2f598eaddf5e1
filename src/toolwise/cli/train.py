"""`toolwise train`: a run from a configuration file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
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
        from toolwise.run import assemble, check_learnable
        from toolwise.settings import to_toml

        check_learnable(found)
        run = assemble(found)
        typer.echo(to_toml(found))
        typer.echo(
            f"# {run.batches.batches_per_epoch} batches an epoch, {len(run.validation_tasks)} held-out tasks, "
            f"tools: {', '.join(run.scheduler.tools) or 'none'}; everything checks out"
        )
        return
    from toolwise.api import train as train_run

    finish(train_run(found, out=out, resume=resume))


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
    for name in ("report.html", "report.png"):
        console.print(f"  {result.out / name}", soft_wrap=True, highlight=False)
    console.print(f"run folder: {result.out}", soft_wrap=True, highlight=False)
    if summary["interrupted"]:
        console.print(f"stopped after step {summary['steps']}; go on with --resume --out {result.out}", soft_wrap=True)
        sys.exit(130)
