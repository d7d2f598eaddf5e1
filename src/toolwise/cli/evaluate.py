"""`toolwise eval`: score a trained run, or any model, on held-out tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolwise.cli.train import Overrides

if TYPE_CHECKING:
    from toolwise.config import RunConfig


def evaluate(
    source: Annotated[Path, typer.Argument(help="A run's folder, or a configuration file.", show_default=False)],
    model: Annotated[str | None, typer.Option(help="Another model than the run's latest checkpoint.")] = None,
    data: Annotated[Path | None, typer.Option(help="Other tasks than data.val.")] = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Roll out and score, one rollout a task, and learn nothing."""
    from toolwise.api import evaluate as evaluate_model
    from toolwise.errors import ConfigError

    config, found = _resolve(source, model, overrides or [])
    tasks = data or config.data.val
    if tasks is None:
        raise ConfigError(f"{source} names no data.val: add --data FILE")
    figures = evaluate_model(found, tasks, config=config)
    if as_json:
        typer.echo(json.dumps(figures, indent=2))
    else:
        _show(figures, found)


def _resolve(source: Path, model: str | None, overrides: list[str]) -> tuple[RunConfig, str]:
    """A folder's configuration with its latest checkpoint, or a file's configuration with its model."""
    from toolwise import checkpoint
    from toolwise.config import load_config
    from toolwise.errors import CheckpointError

    if not source.is_dir():
        config = load_config(source, overrides)
        return config, model or config.model.path
    if not (source / "config.toml").is_file():
        raise CheckpointError(f"{source} has no config.toml: it is no run's folder")
    config = load_config(source / "config.toml", overrides)
    if model is not None:
        return config, model
    found = checkpoint.latest(source / "checkpoints")
    if found is None:
        raise CheckpointError(f"{source} has no whole checkpoint yet: add --model to name a model")
    return config, str(found.path / "model")


def _show(figures: dict[str, Any], model: str) -> None:
    from rich.console import Console
    from rich.table import Table

    parts = {"all": figures, **figures["by_kind"]}
    names = [name for name in figures if name != "by_kind"]
    table = Table(title=model, caption="one rollout a task")
    for column in ("tasks", *names):
        table.add_column(column, justify="left" if column == "tasks" else "right")
    for kind, part in parts.items():
        found = [part.get(name, "") for name in names]
        table.add_row(kind, *(f"{value:.3f}" if isinstance(value, float) else str(value) for value in found))
    Console().print(table)
