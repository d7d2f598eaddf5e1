"""`toolwise eval`: score a trained run or any model on held-out tasks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolwise.cli.train import OverridesOption
from toolwise.terminal import print_json

if TYPE_CHECKING:
    from toolwise.config.schema import RunConfig


def evaluate(
    source: Annotated[Path, typer.Argument(help="Run folder, checkpoint, or configuration file.", show_default=False)],
    model: Annotated[str | None, typer.Option(help="Model to use instead of the run's latest checkpoint.")] = None,
    data: Annotated[Path | None, typer.Option(help="Task file to use instead of data.val.")] = None,
    overrides: OverridesOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the metrics as JSON.")] = False,
    budgets: Annotated[
        str,
        typer.Option(help="Evaluate a run's router at these budgets (such as 0,0.1,…,1) and compare it to baselines."),
    ] = "",
    draws: Annotated[int, typer.Option(min=1, help="--budgets: rollouts per task and route.")] = 16,
    metric: Annotated[
        str, typer.Option(help='--budgets: metric to plot against cost. "auto": correct if reported, else score.')
    ] = "auto",
    otc: Annotated[
        Path | None,
        typer.Option(help="--budgets: baseline run, trained with a reward for the fewest calls among correct answers."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="--budgets: output folder (default: frontier/ beside the checkpoint).")
    ] = None,
    store: Annotated[
        bool, typer.Option(help="--budgets: store the routing thresholds for these budgets in the checkpoint.")
    ] = True,
    jobs: Annotated[int, typer.Option(min=1, help="--budgets: number of rollout processes, one core each.")] = 1,
) -> None:
    """Score a model on held-out tasks, one rollout per task; with --budgets, measure accuracy against cost."""
    if budgets:
        from toolwise.cli.frontier import show_frontier

        return show_frontier(
            source,
            data,
            overrides or [],
            budgets=budgets,
            draws=draws,
            metric=metric,
            otc=otc,
            out=out,
            store=store,
            jobs=jobs,
            as_json=as_json,
        )
    from toolwise.api import evaluate as evaluate_model
    from toolwise.data import load_tasks
    from toolwise.errors import ConfigError
    from toolwise.training.changes import check_files

    config, model_path = resolve_model(source, model, overrides or [])
    if source.is_dir():
        check_files(
            config,
            source,
            *(() if data else ("data.val",)),
            "reward",
            "tools",
            "env",
            "router.name",
            "rollout.tool_parser",
        )
    file = data or config.data.val
    if file is None:
        raise ConfigError(f"{source} does not set data.val: add --data FILE")
    tasks = load_tasks(file, limit=config.data.val_limit if data is None else None)
    metrics = evaluate_model(model_path, tasks, config=config)
    if as_json:
        print_json(metrics)
    else:
        _show(metrics, model_path)
    return None


def resolve_model(source: Path, model: str | None, overrides: list[str]) -> tuple[RunConfig, str]:
    """Return the configuration and model path of a run, of one of its checkpoints, or of a configuration file.

    `model` overrides the model; a run folder means its latest checkpoint.
    """
    from toolwise.agent.source import find_checkpoint, find_run
    from toolwise.config.schema import load_config

    if not source.is_dir():
        config = load_config(source, overrides)
        return config, model or config.model.path
    problem = "has no config.toml, so it is not a run folder: give a run folder or a configuration file"
    config = load_config(find_run(source, problem) / "config.toml", overrides)
    if model is None:
        found = find_checkpoint(source, command="toolwise eval", hint="choose a model with --model")
        model = str(found.path / "model")
    return config, model


def _show(metrics: dict[str, Any], model: str) -> None:
    from rich.table import Table

    from toolwise.terminal.display import Console

    parts = {"all": metrics, **metrics["by_kind"]}
    table = Table(title=model, caption="one rollout per task")
    for column in ("tasks", *parts):  # metrics are rows: a router reports more than fit as columns
        table.add_column(column, justify="left" if column == "tasks" else "right")
    for name in (name for name in metrics if name != "by_kind"):
        values = [part.get(name, "") for part in parts.values()]
        table.add_row(name, *(f"{value:.3f}" if isinstance(value, float) else str(value) for value in values))
    Console().print(table)
