"""`toolwise init`: files to begin with. One small module a kind of thing."""

from __future__ import annotations

import typer

from toolwise.cli.init import reward

app = typer.Typer(name="init", help="Write files to begin with.", no_args_is_help=True)
app.command("reward")(reward.init_reward)
