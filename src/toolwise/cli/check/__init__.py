"""`toolwise check`: looks at what people wrote before a run trusts it. One small module a kind of thing."""

from __future__ import annotations

import typer

from toolwise.cli.check import env, reward, tool

app = typer.Typer(name="check", help="Check rewards, environments and tools before a run.", no_args_is_help=True)
app.command("env")(env.check_env)
app.command("reward")(reward.check_reward)
app.command("tool")(tool.check_tool)
