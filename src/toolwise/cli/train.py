"""The commands of a training run: `toolwise demo`, `train`, `resume` and `export`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from toolwise.errors import ConfigError
from toolwise.terminal import print_error, print_line

if TYPE_CHECKING:
    from toolwise.config.schema import RunConfig
    from toolwise.training.run_folder import RunResult

TrustOption = Annotated[
    bool,
    typer.Option("--trust-code", help="Run the code that an agent folder brings, with your permissions."),
]
OverridesOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override a configuration setting; repeatable.")
]
USER_FILES = ("reward", "tools", "env", "agent", "router.name", "rollout.tool_parser")
"""Settings that may name a file of the user's, which may have changed since the run."""


def demo(
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the tasks and of training.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Run folder (default: runs/demo-TIME).", show_default=False)] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the last checkpoint in --out.")] = False,
    frontier: Annotated[
        bool, typer.Option(help="After training, compare the router with baselines at several budgets.")
    ] = True,
    overrides: OverridesOption = None,
) -> None:
    """Train a small agent and its router within a cost budget, and show what they learned."""
    from toolwise.api import new_run_folder, read_config
    from toolwise.demo.recipe import demo_config, write_tasks
    from toolwise.training.run_folder import check_folder

    if resume and out is None:
        raise ConfigError("--resume needs --out DIR: the folder of the demo to resume")
    folder = out if out is not None else new_run_folder("demo")
    config = read_config(demo_config(folder, seed), overrides or [])
    check_folder(folder, config, resume=resume)
    write_tasks(
        read_config(demo_config(folder, config.seed))
    )  # without overrides: files that --set names belong to the user
    run_training(config, folder, resume)
    if frontier and config.router.enable:
        _show_frontier(folder)


def train(
    config: Annotated[Path, typer.Argument(help="TOML or YAML configuration file.", show_default=False)],
    overrides: OverridesOption = None,
    out: Annotated[Path | None, typer.Option(help="Run folder (default: runs/NAME-TIME).", show_default=False)] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the last checkpoint in --out.")] = False,
    cluster: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help='Run on a Ray cluster: "local" starts one on this machine; "auto", HOST:PORT: docs/cluster.md.',
            show_default=False,
        ),
    ] = "",
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Roll out and score two tasks, estimate memory and time; do not train or write anything."
        ),
    ] = False,
) -> None:
    """Train an agent as described by a configuration file."""
    from toolwise.config.schema import load_config

    if resume and out is None:
        raise ConfigError("--resume needs --out DIR: the folder of the run to resume")
    addresses = [f"cluster.address={json.dumps(cluster)}"] if cluster else []
    run_config = load_config(config, [*(overrides or []), *addresses])
    if dry_run:
        run_dry_run(run_config, out, resume)
    else:
        from toolwise.api import new_run_folder

        run_training(run_config, out or new_run_folder(run_config.name), resume)


def resume(
    run: Annotated[Path, typer.Argument(help="Run folder.", show_default=False)],
    overrides: OverridesOption = None,
) -> None:
    """Resume a run of `train` or `sft` from its last checkpoint, with its own settings."""
    from toolwise.config.sft import SftConfig
    from toolwise.training.changes import check_files, load_run_config

    config = load_run_config(run, overrides or [])
    if isinstance(config, SftConfig):
        from toolwise.api import resume_sft
        from toolwise.cli.fine_tune import report_sft

        return report_sft(until_interrupted(lambda: resume_sft(config, run), run))
    check_files(config, run, "data.", *USER_FILES, "trainer", "algorithm", "actor")
    return run_training(config, run, resume=True)


def export(
    source: Annotated[
        Path,
        typer.Argument(metavar="AGENT", help="Run folder, checkpoint, agent folder, or model.", show_default=False),
    ],
    out: Annotated[Path, typer.Option(help="Output folder; must not exist yet.", show_default=False)],
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Dtype of the exported weights (default: as saved).", show_default=False),
    ] = None,
    best: Annotated[
        str,
        typer.Option(
            metavar="METRIC",
            help="Export the checkpoint with the best validation METRIC (score, -cost, …) instead of the latest.",
            show_default=False,
        ),
    ] = "",
    adapters: Annotated[
        bool,
        typer.Option("--adapters", help="Export the LoRA adapters as a peft folder, instead of merged with the model."),
    ] = False,
    overrides: OverridesOption = None,
    trust_code: TrustOption = False,
) -> None:
    """Export an agent, such as a run's, to a folder that transformers loads, with a model card. --set changes what the
    agent does; other tools need --trust-code if the agent brings code."""
    from toolwise.agent.export import export_model

    exported = export_model(
        source, out, dtype=dtype, best=best, adapters=adapters, overrides=overrides or [], trust_code=trust_code
    )
    what = "adapters" if adapters else "model"
    print_line(f"{exported.out}: {what} of step {exported.step} in {exported.dtype}; model card: README.md")


def run_dry_run(config: RunConfig, out: Path | None, resume: bool) -> None:
    """Roll out and score two tasks without writing a run. Exits with status 1 if there are problems."""
    from toolwise.training.run import check_learnable
    from toolwise.training.run_folder import check_folder
    from toolwise.training.tasks import cache_folder, with_cache
    from toolwise.training.trackers.observers import load_observers

    check_learnable(config)
    load_observers(config.trainer)
    if out is not None:
        check_folder(out, config, resume=resume)
    from toolwise.checks.dry_run.command import dry_run

    findings = dry_run(config if out is None else with_cache(config, cache_folder(config, out)), print_line)
    for note in findings.notes:
        print_line(f"note: {note}")
    if findings.problems:
        for problem in findings.problems:
            print_error(f"dry run failed: {problem}")
        if findings.traceback:
            print_line(findings.traceback.rstrip(), err=True)
        raise typer.Exit(1)
    print_line("dry run passed; no run was written")


def run_training(config: RunConfig, out: Path, resume: bool) -> None:
    """Train and show the result; if the user interrupts, say how to resume."""
    from toolwise.api import train

    report_result(until_interrupted(lambda: train(config, out=out, resume=resume), out))


def until_interrupted(train: Callable[[], RunResult], out: Path) -> RunResult:
    """The result of `train`; a second Ctrl-C ends the process at once and says how to resume."""
    from toolwise.training.changes import resume_command

    try:
        return train()
    except KeyboardInterrupt:
        sys.stdout.flush()
        hint = f"resume from the last checkpoint with: {resume_command(out)}"
        print_error(f"stopped immediately; {hint if (out / 'config.toml').is_file() else 'nothing had started yet'}")
        os._exit(130)  # a normal exit would wait for the model to finish generating


def report_result(result: RunResult) -> None:
    """Print the before/after table, the paths of the results and, after an interrupt, how to resume."""
    from toolwise.terminal.display import Console
    from toolwise.training.changes import resume_command
    from toolwise.training.metrics import describe_totals
    from toolwise.training.trackers.observers import describe_observer_errors
    from toolwise.view.comparison import describe_budgets
    from toolwise.view.report import before_after_table

    summary = result.summary
    if result.note:
        return print_line(result.note)
    if summary["before"] and summary["after"]:
        Console().print(before_after_table(summary))
    steps = "1 step" if summary["steps"] == 1 else f"{summary['steps']} steps"
    print_line(f"{steps} in {summary['seconds']:.0f} s, peak memory {summary['peak_rss_mb']:.0f} MB")
    for line in describe_budgets(summary):
        print_line(line)
    if faults := describe_totals(summary.get("faults") or {}):
        print_line(f"faults: {faults}")
    paths = (f"  {result.out / 'report.html'}", f"  {result.out / 'report.png'}", f"run folder: {result.out}")
    for line in (*describe_observer_errors(summary.get("observers") or []), *paths):
        print_line(line)
    if summary.get("stopped_early"):
        print_line(f"ended after step {summary['steps']} of {summary['total_steps']}: {summary['stopped']}")
    if summary["interrupted"]:
        why = f" by {summary['stopped']}" if summary["stopped"] else ""
        print_line(f"stopped after step {summary['steps']}{why}; resume with: {resume_command(result.out)}")
        sys.exit(0 if summary["stopped"] else 130)
    if summary["updated"] is False:
        sys.exit(3)  # the actor should have been trained and was not updated
    return None


def _show_frontier(folder: Path) -> None:
    """Evaluate accuracy against cost, show it, and suggest next commands."""
    from toolwise.concurrency import deadlines
    from toolwise.demo.recipe import evaluate_small_frontier
    from toolwise.terminal.display import Console, Status
    from toolwise.view.frontier import frontier_tables
    from toolwise.view.report import write_report

    try:
        with Status(Console(stderr=True), "frontier") as status:
            evaluation = deadlines.run(
                evaluate_small_frontier(
                    folder, on_done=lambda what, done, of: status.update(f"frontier: {done} of {of} groups of rollouts")
                )
            )
    except KeyboardInterrupt:
        sys.stdout.flush()
        print_error(
            "training finished, but its frontier was interrupted; to evaluate it: "
            f"toolwise eval {folder} --budgets 0,0.1,…,1"
        )
        os._exit(130)  # a normal exit would wait for the model to finish generating
    write_report(folder)
    first, *_, fixed = frontier_tables(evaluation.frontier.to_json(), "accuracy against cost on held-out tasks")
    for table in (first, fixed):
        Console().print(table)
    if evaluation.time is not None:
        print_line(evaluation.time.describe())
    lines = (
        f"  {folder / 'frontier.png'}, {folder / 'frontier.json'}; also in {folder / 'report.html'}",
        "try next:",
        f'  toolwise run {folder} "How many bridges does Alder have?"',
        f'  toolwise run {folder} "What is 417 * 38?" --budget 0.3',
        f"  toolwise eval {folder} --budgets 0,0.1,…,1    # the full frontier: more rollouts, takes minutes",
    )
    print_line("\n".join(lines))
