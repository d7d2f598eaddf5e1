"""`toolwise data`: prepare public datasets, label tasks for the router, and inspect task files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from toolwise.cli.label import label
from toolwise.errors import ConfigError
from toolwise.terminal import print_json, print_line

app = typer.Typer(name="data", help="Prepare, label and inspect datasets.", no_args_is_help=True)


@app.command()
def prepare(
    name: Annotated[Literal["gsm8k", "rlla"], typer.Argument(help="Dataset in SOURCE.")],
    source: Annotated[Path, typer.Argument(help="The published file, or a folder with train and test files.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Output .parquet or .jsonl file, or folder (default: data/NAME).", show_default=False),
    ] = None,
    oracle_tool: Annotated[
        bool,
        typer.Option("--oracle-tool", help="gsm8k only: offer a tool that tells whether an answer is correct."),
    ] = False,
) -> None:
    """Convert a published dataset into rows to train on."""
    from toolwise.data.prepare import prepare_gsm8k, prepare_rlla

    if oracle_tool and name != "gsm8k":
        raise ConfigError(f"--oracle-tool applies to gsm8k only; leave it out for {name}")
    target = out if out is not None else Path("data") / name
    is_rlla = name == "rlla"
    written = prepare_rlla(source, target) if is_rlla else prepare_gsm8k(source, target, oracle_tool=oracle_tool)
    for path, rows in written.items():
        print_line(f"wrote {rows:,} rows to {path}")


app.command()(label)


@app.command()
def stats(
    file: Annotated[Path, typer.Argument(help="Task file: .parquet, .jsonl or .json.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check every row of a task file and summarize its contents."""
    from toolwise.data.stats import describe_tasks, stats_table
    from toolwise.terminal.display import Console

    description = describe_tasks(file)
    if as_json:
        print_json(description)
    else:
        Console().print(stats_table(description))
