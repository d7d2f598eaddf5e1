"""`toolwise init reward`: a reward to begin with, and a few rollouts to try it on."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from toolwise.terminal import print_line


class RewardMode(StrEnum):
    POINTWISE = "pointwise"
    BATCH = "batch"
    GROUP = "group"


def init_reward(
    name: Annotated[str, typer.Argument(help="The function's name, and the file's.")] = "my_reward",
    mode: Annotated[
        RewardMode, typer.Option(help="One rollout a call, all of a step, or all of a task.")
    ] = RewardMode.POINTWISE,
    folder: Annotated[Path, typer.Option(help="Where to write.", show_default=False)] = Path(),
) -> None:
    """Write a reward that works, with comments, beside a small sample of rollouts that it passes its check on."""
    from toolwise.checks.reward.starter import create_reward_files

    code, rollouts = create_reward_files(folder, name, mode.value)
    print_line(f"wrote {code} and {rollouts}; look at it with:")
    print_line(f"  toolwise check reward {code} --rollouts {rollouts}")
