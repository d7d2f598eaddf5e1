"""`toolwise demo`: train the bundled model and its router in a few minutes on a laptop."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolwise.cli.train import OverridesOption, run_training
from toolwise.terminal import print_error, print_line

if TYPE_CHECKING:
    from toolwise.frontier.evaluation import FrontierEvaluation


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
    from toolwise.errors import ConfigError
    from toolwise.training.run_files import check_folder

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


def _show_frontier(folder: Path) -> None:
    """Evaluate accuracy against cost, show it, and suggest next commands."""
    from toolwise.concurrency import deadlines
    from toolwise.demo.frontier import evaluate_small_frontier
    from toolwise.frontier.report import tables
    from toolwise.terminal.display import Console, Status
    from toolwise.view.report import write_report

    async def work() -> FrontierEvaluation:
        with Status(Console(stderr=True), "frontier") as status:
            return await evaluate_small_frontier(
                folder, on_done=lambda what, done, of: status.update(f"frontier: {done} of {of} groups of rollouts")
            )

    try:
        evaluation = deadlines.run(work())
    except KeyboardInterrupt:
        sys.stdout.flush()
        command = f"toolwise eval {folder} --budgets 0,0.1,…,1"
        print_error(f"training finished, but its frontier was interrupted; to evaluate it: {command}")
        os._exit(130)  # a normal exit would wait for the model to finish generating
    write_report(folder)
    first, *_, fixed = tables(evaluation.frontier, "accuracy against cost on held-out tasks")
    for table in (first, fixed):
        Console().print(table)
    if evaluation.time is not None:
        print_line(evaluation.time.describe())
    for line in (
        f"  {folder / 'frontier.png'}, {folder / 'frontier.json'}; also in {folder / 'report.html'}",
        "try next:",
        f'  toolwise run {folder} "How many bridges does Alder have?"',
        f'  toolwise run {folder} "What is 417 * 38?" --budget 0.3',
        f"  toolwise eval {folder} --budgets 0,0.1,…,1    # the full frontier: more rollouts, takes minutes",
    ):
        print_line(line)
