"""`toolwise demo`: train the model that ships, live, in a few minutes on a laptop."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolwise.cli.train import Overrides, go


def demo(
    seed: Annotated[int, typer.Option(min=0, help="Another seed, another set of tasks and draws.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder. [default: runs/demo-TIME]", show_default=False)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in --out.")] = False,
    overrides: Overrides = None,
) -> None:
    """Train a small agent that ships with the project, live, and show what it learned."""
    from toolwise.api import new_folder, read_config
    from toolwise.demo.recipe import demo_settings, write_tasks
    from toolwise.errors import ConfigError
    from toolwise.training import check_folder

    if resume and out is None:
        raise ConfigError("--resume needs --out DIR: the folder of the demo to go on with")
    folder = out if out is not None else new_folder("demo")
    config = read_config(demo_settings(folder, seed), overrides or [])
    check_folder(folder, config, resume=resume)
    write_tasks(read_config(demo_settings(folder, config.seed)))  # not to where --set points: those files are not ours
    go(config, folder, resume)
