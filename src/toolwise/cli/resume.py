"""`toolwise resume`: continue a run from its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolwise.cli.train import OverridesOption, run_training


def resume(
    run: Annotated[Path, typer.Argument(help="Run folder.", show_default=False)],
    overrides: OverridesOption = None,
) -> None:
    """Resume a run from its last checkpoint, with its own settings."""
    from toolwise.training.changes import check_files, load_run_config

    config = load_run_config(run, overrides or [])
    own = ("data.", "reward", "tools", "env", "router.name", "rollout.tool_parser", "trainer", "algorithm", "actor")
    check_files(config, run, *own)
    run_training(config, run, resume=True)
