"""`toolwise init`: write starter files. One module per command."""

from __future__ import annotations

import typer

from toolwise.cli.init import reward

app = typer.Typer(name="init", help="Write starter files.", no_args_is_help=True)
app.command("reward")(reward.init_reward)
