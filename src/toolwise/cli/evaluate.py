"""`toolwise eval`: score a trained run, or any model, on held-out tasks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolwise.cli.train import OverridesOption
from toolwise.terminal import print_json

if TYPE_CHECKING:
    from toolwise.config.schema import RunConfig


def evaluate(
    source: Annotated[Path, typer.Argument(help="A run, a checkpoint of one, or a configuration.", show_default=False)],
    model: Annotated[str | None, typer.Option(help="Another model than the run's latest checkpoint.")] = None,
    data: Annotated[Path | None, typer.Option(help="Other tasks than data.val.")] = None,
    overrides: OverridesOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    budgets: Annotated[
        str, typer.Option(help="Of a run with a router: accuracy against cost at 0,0.1,…,1, beside baselines.")
    ] = "",
    draws: Annotated[int, typer.Option(min=1, help="--budgets: rollouts of each task under each route.")] = 16,
    metric: Annotated[str, typer.Option(help='--budgets: what counts. "auto": correct, or the score.')] = "auto",
    otc: Annotated[
        Path | None, typer.Option(help="--budgets: a run trained with a fewest-calls-among-correct reward.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="--budgets: where its files go. [default: frontier/ beside the checkpoint]")
    ] = None,
    store: Annotated[
        bool, typer.Option(help="--budgets: put the thresholds that keep to them into the checkpoint.")
    ] = True,
    jobs: Annotated[int, typer.Option(min=1, help="--budgets: processes that roll out, a core each.")] = 1,
) -> None:
    """Roll out and score, and learn nothing: one rollout a task, or with --budgets a whole frontier."""
    if budgets:
        from toolwise.cli.frontier import FrontierOptions, show_frontier

        options = FrontierOptions(budgets, draws, metric, otc, out, store, jobs)
        return show_frontier(source, data, overrides or [], options, as_json=as_json)
    from toolwise.api import evaluate as evaluate_model
    from toolwise.data import load_tasks
    from toolwise.errors import ConfigError
    from toolwise.training.changes import check_files

    config, found = resolve_model(source, model, overrides or [])
    if source.is_dir():
        check_files(config, source, *(() if data else ("data.val",)), "reward", "tools", "env")
    file = data or config.data.val
    if file is None:
        raise ConfigError(f"{source} names no data.val: add --data FILE")
    tasks = load_tasks(file, limit=config.data.val_limit if data is None else None)
    figures = evaluate_model(found, tasks, config=config)
    if as_json:
        print_json(figures)
    else:
        _show(figures, found)
    return None


def resolve_model(source: Path, model: str | None, overrides: list[str]) -> tuple[RunConfig, str]:
    """A run's configuration with its latest or a named checkpoint, or a file's configuration with its model."""
    from toolwise.config.schema import load_config
    from toolwise.errors import CheckpointError
    from toolwise.training import checkpoint

    if not source.is_dir():
        config = load_config(source, overrides)
        return config, model or config.model.path
    named = (source / checkpoint.MANIFEST).is_file()
    run = source.resolve().parent.parent if named else source
    if not (run / "config.toml").is_file():
        raise CheckpointError(f"{run} has no config.toml: it is no run's folder; name one, or a configuration file")
    config = load_config(run / "config.toml", overrides)
    if model is not None:
        return config, model
    damaged: list[str] = []
    found = checkpoint.load(source) if named else checkpoint.latest(run / "checkpoints", warnings_out=damaged)
    if damaged:  # figures of an older one would pass for those of the run
        raise CheckpointError(f"{damaged[0].removeprefix('passed over: ')}: toolwise eval RUN/checkpoints/step-…")
    if found is None:
        raise CheckpointError(f"{source} has no whole checkpoint yet: add --model to name a model")
    return config, str(found.path / "model")


def _show(figures: dict[str, Any], model: str) -> None:
    from rich.table import Table

    from toolwise.terminal.display import Console

    parts = {"all": figures, **figures["by_kind"]}
    table = Table(title=model, caption="one rollout a task")
    for column in ("tasks", *parts):  # a router reports more figures than fit side by side
        table.add_column(column, justify="left" if column == "tasks" else "right")
    for name in (name for name in figures if name != "by_kind"):
        found = [part.get(name, "") for part in parts.values()]
        table.add_row(name, *(f"{value:.3f}" if isinstance(value, float) else str(value) for value in found))
    Console().print(table)
