"""`toolwise data`: prepare public datasets, and look at what a file of tasks holds."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from toolwise.errors import ConfigError
from toolwise.terminal import print_json, print_line

app = typer.Typer(name="data", help="Prepare datasets and look at them.", no_args_is_help=True)


class Dataset(StrEnum):
    GSM8K = "gsm8k"
    RLLA = "rlla"


@app.command()
def prepare(
    name: Annotated[Dataset, typer.Argument(help="Which dataset SOURCE holds.")],
    source: Annotated[Path, typer.Argument(help="A file as published, or a folder with train and test files.")],
    out: Annotated[
        Path | None,
        typer.Option(help="A .parquet or .jsonl file, or a folder. [default: data/NAME]", show_default=False),
    ] = None,
    oracle_tool: Annotated[
        bool,
        typer.Option("--oracle-tool", help="gsm8k: offer the tool that tells whether an answer is right."),
    ] = False,
) -> None:
    """Turn a published dataset into rows to train on."""
    from toolwise.data.prepare import prepare_gsm8k, prepare_rlla

    if oracle_tool and name is not Dataset.GSM8K:
        raise ConfigError(f"--oracle-tool is for gsm8k; leave it out for {name}")
    target = out if out is not None else Path("data") / name
    if name is Dataset.GSM8K:
        written = prepare_gsm8k(source, target, oracle_tool=oracle_tool)
    else:
        written = prepare_rlla(source, target)
    for file in written:
        print_line(f"wrote {file.rows:,} rows to {file.path}")


@app.command()
def label(
    file: Annotated[Path, typer.Argument(help="A .parquet, .jsonl or .json file of tasks.")],
    base_url: Annotated[str, typer.Option(help="An OpenAI-compatible server, up to and including /v1.")] = "",
    model: Annotated[str, typer.Option(help="The server's name for the model to ask.")] = "",
    heuristic: Annotated[bool, typer.Option("--heuristic", help="By rules and ground truths, offline.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="A .jsonl or .csv beside the data, or a .parquet that has the data too. [default: FILE.labels.jsonl]",
            show_default=False,
        ),
    ] = None,
    tools: Annotated[list[str] | None, typer.Option(help="A tool that tasks offer by name; may be repeated.")] = None,
    api_key_env: Annotated[str, typer.Option(help="The environment variable that holds the server's key.")] = "",
    cache: Annotated[
        Path | None, typer.Option(help="Where answers are kept. [default: OUT.cache.jsonl]", show_default=False)
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Questions at once at most.")] = 16,
) -> None:
    """Label tools with families, and rows with the route they want: for a warm start of the router. Never needed."""
    from toolwise.cli.label import LabelOptions, label_file

    label_file(
        file,
        out if out is not None else file.with_name(f"{file.stem}.labels.jsonl"),
        tools or [],
        None if heuristic else LabelOptions(base_url, model, api_key_env, cache, concurrency),
    )


@app.command()
def stats(
    file: Annotated[Path, typer.Argument(help="A .parquet, .jsonl or .json file of tasks.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check every row of a file and show what it holds."""

    from toolwise.data.stats import describe_tasks, stats_table
    from toolwise.terminal.display import Console

    description = describe_tasks(file)
    if as_json:
        print_json(description)
    else:
        Console().print(stats_table(description))
