"""`toolwise init`: write starter files: a reward, and a few rollouts to try it on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from toolwise.terminal import print_line

app = typer.Typer(name="init", help="Write starter files.", no_args_is_help=True)


@app.command("reward")
def init_reward(
    name: Annotated[str, typer.Argument(help="Name of the function and of its file.")] = "my_reward",
    mode: Annotated[
        Literal["pointwise", "batch", "group"],
        typer.Option(help="What one call scores: one rollout, all of a step, or all of a task."),
    ] = "pointwise",
    folder: Annotated[Path, typer.Option(help="Folder to write to (default: .).", show_default=False)] = Path(),
) -> None:
    """Write a working, commented reward and a small sample of rollouts to check it on."""
    from toolwise.checks.reward.starter import create_reward_files

    code, rollouts = create_reward_files(folder, name, mode)
    print_line(f"wrote {code} and {rollouts}; check the reward with:")
    print_line(f"  toolwise check reward {code} --rollouts {rollouts}")
