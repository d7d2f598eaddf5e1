"""`toolwise init`: starters for a reward, a tool, an environment and a run, each with the command that checks it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from toolwise.terminal import print_line

app = typer.Typer(name="init", help="Write starter files.", no_args_is_help=True)

FolderOption = Annotated[Path, typer.Option(help="Folder to write to (default: .).", show_default=False)]


@app.command("reward")
def init_reward(
    name: Annotated[str, typer.Argument(help="Name of the function and of its file.")] = "my_reward",
    mode: Annotated[
        Literal["pointwise", "batch", "group"],
        typer.Option(help="What one call scores: one rollout, all of a step, or all of a task."),
    ] = "pointwise",
    folder: FolderOption = Path(),
) -> None:
    """Write a working, commented reward and a small sample of rollouts to check it on."""
    from toolwise.checks.reward.starter import create_reward_files

    code, rollouts = create_reward_files(folder, name, mode)
    print_line(f"wrote {code} and {rollouts}; check the reward with:")
    print_line(f"  {shlex.join(['toolwise', 'check', 'reward', str(code), '--rollouts', str(rollouts)])}")


@app.command("tool")
def init_tool(
    name: Annotated[str, typer.Argument(help="Name of the function and of its file.")] = "my_tool",
    folder: FolderOption = Path(),
) -> None:
    """Write a working, commented tool."""
    from toolwise.checks.starter_files import create_starter

    (code,) = create_starter(folder, "tool", name)
    print_line(f"wrote {code}; check the tool with:")
    call = ["--call", '{"item": "bread"}']
    print_line(f"  {shlex.join(['toolwise', 'check', 'tool', f'{code}:{name}', *call])}")


@app.command("env")
def init_env(
    name: Annotated[str, typer.Argument(help="Name of the file; the class is named after it.")] = "my_env",
    folder: FolderOption = Path(),
) -> None:
    """Write a working, commented environment."""
    from toolwise.checks.starter_files import class_name, create_starter

    (code,) = create_starter(folder, "env", name)
    print_line(f"wrote {code}; check the environment with:")
    print_line(f"  {shlex.join(['toolwise', 'check', 'env', f'{code}:{class_name(name)}'])}")


@app.command("config")
def init_config(
    name: Annotated[str, typer.Argument(help="Name of the run and of its files.")] = "my_run",
    folder: FolderOption = Path(),
) -> None:
    """Write the configuration of a run and tasks for it, ready to train."""
    from toolwise.checks.starter_files import create_starter

    config, *tasks = create_starter(folder, "config", name)
    print_line(f"wrote {config}, {' and '.join(map(str, tasks))}; try the run with:")
    print_line(f"  {shlex.join(['toolwise', 'train', str(config), '--dry-run'])}")
