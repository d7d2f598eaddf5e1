"""`toolwise train`: train from a configuration file."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolwise.terminal import print_error, print_line

if TYPE_CHECKING:
    from toolwise.config.schema import RunConfig
    from toolwise.training.run_result import RunResult

OverridesOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override a configuration setting; repeatable.")
]


def train(
    config: Annotated[Path, typer.Argument(help="TOML or YAML configuration file.", show_default=False)],
    overrides: OverridesOption = None,
    out: Annotated[Path | None, typer.Option(help="Run folder (default: runs/NAME-TIME).", show_default=False)] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the last checkpoint in --out.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Roll out and score two tasks, estimate memory and time; do not train or write anything."
        ),
    ] = False,
) -> None:
    """Train an agent as described by a configuration file."""
    from toolwise.config.schema import load_config
    from toolwise.errors import ConfigError

    if resume and out is None:
        raise ConfigError("--resume needs --out DIR: the folder of the run to resume")
    run_config = load_config(config, overrides or [])
    if dry_run:
        run_dry_run(run_config, out, resume)
    else:
        from toolwise.api import new_run_folder

        run_training(run_config, out or new_run_folder(run_config.name), resume)


def run_dry_run(config: RunConfig, out: Path | None, resume: bool) -> None:
    """Roll out and score two tasks without writing anything. Exits with status 1 if there are problems."""
    from toolwise.training.run import check_learnable
    from toolwise.training.run_files import check_folder
    from toolwise.training.trackers.observers import load_observers

    check_learnable(config)
    load_observers(config.trainer)
    if out is not None:
        check_folder(out, config, resume=resume)
    from toolwise.checks.dry_run.command import dry_run

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
    """Train and show the result; if the user interrupts, say how to resume."""
    from toolwise.api import train
    from toolwise.training.changes import resume_command

    try:
        result = train(config, out=out, resume=resume)
    except KeyboardInterrupt:
        sys.stdout.flush()
        started = (out / "config.toml").is_file()
        hint = f"resume from the last checkpoint with: {resume_command(out)}" if started else "nothing had started yet"
        print_error(f"stopped immediately; {hint}")
        os._exit(130)  # a normal exit would wait for the model to finish generating
    report_result(result)


def report_result(result: RunResult) -> None:
    """Print the before/after table, the paths of the results and, after an interrupt, how to resume."""
    from toolwise.terminal.display import Console
    from toolwise.training.changes import resume_command
    from toolwise.training.fault_rates import describe_totals
    from toolwise.training.trackers.contained import describe_observer_errors
    from toolwise.view.report import before_after_table

    if result.note:
        return print_line(result.note)
    console = Console()
    summary = result.summary
    if summary["before"] and summary["after"]:
        console.print(before_after_table(summary))
    steps = "1 step" if summary["steps"] == 1 else f"{summary['steps']} steps"
    console.print(f"{steps} in {summary['seconds']:.0f} s, peak memory {summary['peak_rss_mb']:.0f} MB")
    if faults := describe_totals(summary.get("faults") or {}):
        print_line(f"faults: {faults}")
    for line in describe_observer_errors(summary.get("observers") or []):
        print_line(line)
    for line in (f"  {result.out / 'report.html'}", f"  {result.out / 'report.png'}", f"run folder: {result.out}"):
        print_line(line)
    if summary["interrupted"]:
        why = f" by {summary['stopped']}" if summary["stopped"] else ""
        print_line(f"stopped after step {summary['steps']}{why}; resume with: {resume_command(result.out)}")
        sys.exit(0 if summary["stopped"] else 130)
    if summary["updated"] is False:
        sys.exit(3)  # the actor should have been trained and was not updated
    return None
