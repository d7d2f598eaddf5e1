"""`toolwise check`: check user-written rewards, environments and tools before a run. One module per command."""

from __future__ import annotations

import typer

from toolwise.cli.check import env, reward, tool

app = typer.Typer(name="check", help="Check rewards, environments and tools before a run.", no_args_is_help=True)
app.command("env")(env.check_env)
app.command("reward")(reward.check_reward)
app.command("tool")(tool.check_tool)
