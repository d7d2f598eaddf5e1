"""`toolwise resume`: go on with a run, from its folder alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolwise.cli.train import OverridesOption, run_training


def resume(
    run: Annotated[Path, typer.Argument(help="The run's folder.", show_default=False)],
    overrides: OverridesOption = None,
) -> None:
    """Go on with a run from its last checkpoint, under its own settings."""
    from toolwise.training.changes import check_files, load_run_config

    config = load_run_config(run, overrides or [])
    check_files(config, run, "data.", "reward", "tools", "env")
    run_training(config, run, resume=True)
