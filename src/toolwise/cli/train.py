"""`toolwise train`: a run from a configuration file."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolwise.terminal import print_error, print_line

if TYPE_CHECKING:
    from toolwise.config.schema import RunConfig
    from toolwise.training.trainer import RunResult

OverridesOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override a setting; may be given again.")
]


def train(
    config: Annotated[Path, typer.Argument(help="A TOML or YAML file.", show_default=False)],
    overrides: OverridesOption = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder. [default: runs/NAME-TIME]", show_default=False)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in --out.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Roll out and score two tasks, estimate memory and time; train and write nothing."
        ),
    ] = False,
) -> None:
    """Train as a configuration file says."""
    from toolwise.config.schema import load_config
    from toolwise.errors import ConfigError

    if resume and out is None:
        raise ConfigError("--resume needs --out DIR: the folder of the run to go on with")
    found = load_config(config, overrides or [])
    if dry_run:
        run_dry_run(found, out, resume)
    else:
        from toolwise.api import new_run_folder

        run_training(found, out or new_run_folder(found.name), resume)


def run_dry_run(config: RunConfig, out: Path | None, resume: bool) -> None:
    """A dry run: two tasks for real, and nothing written. Exit status 1 where the configuration has problems."""
    from toolwise.training.run import check_learnable
    from toolwise.training.run_files import check_folder

    check_learnable(config)
    if out is not None:
        check_folder(out, config, resume=resume)
    from toolwise.checks.dry_run import dry_run

    findings = dry_run(config, print_line)
    for note in findings.notes:
        print_line(f"note: {note}")
    if findings.problems:
        for problem in findings.problems:
            print_error(f"dry run failed: {problem}")
        if findings.traceback:
            print_line(findings.traceback.rstrip(), err=True)
        raise typer.Exit(1)
    print_line("dry run passed; nothing was written")


def run_training(config: RunConfig, out: Path, resume: bool) -> None:
    """Train and show what came of it; whoever stops a run is told how to go on."""
    from toolwise.api import train
    from toolwise.training.changes import resume_command

    try:
        result = train(config, out=out, resume=resume)
    except KeyboardInterrupt:
        sys.stdout.flush()
        begun = (out / "config.toml").is_file()
        how = f"go on from the last checkpoint with: {resume_command(out)}" if begun else "nothing had begun yet"
        print_error(f"stopped at once; {how}")
        os._exit(130)  # an ordinary exit would wait for the model to finish what it is generating
    report_result(result)


def report_result(result: RunResult) -> None:
    """The before/after table, and where everything is; an interrupted run says how to go on."""
    from toolwise.terminal.display import Console
    from toolwise.training.changes import resume_command
    from toolwise.training.fault_rates import describe_totals
    from toolwise.view.report import before_after_table

    if result.note:
        return print_line(result.note)
    console = Console()
    summary = result.summary
    if summary["before"] and summary["after"]:
        console.print(before_after_table(summary))
    steps = "1 step" if summary["steps"] == 1 else f"{summary['steps']} steps"
    console.print(f"{steps} in {summary['seconds']:.0f} s, peak memory {summary['peak_rss_mb']:.0f} MB")
    if failed := describe_totals(summary.get("faults") or {}):
        print_line(f"faults: {failed}")
    for line in (f"  {result.out / 'report.html'}", f"  {result.out / 'report.png'}", f"run folder: {result.out}"):
        print_line(line)
    if summary["interrupted"]:
        print_line(f"stopped after step {summary['steps']}; go on with: {resume_command(result.out)}")
        sys.exit(130)
    if summary["updated"] is False:
        sys.exit(3)  # it was meant to train its actor, and has not
    return None
