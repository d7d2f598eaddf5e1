"""`toolwise data`: prepare public datasets, label tasks for the router, and inspect task files."""

from __future__ import annotations

import os
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from toolwise.errors import ConfigError
from toolwise.terminal import print_json, print_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from toolwise.data.row_layout import RowLayout
    from toolwise.routing.labels.labeler import LabellingResult
    from toolwise.tools.base import BaseTool
    from toolwise.types import Task

app = typer.Typer(name="data", help="Prepare, label and inspect datasets.", no_args_is_help=True)

ColumnOption = Annotated[
    list[str] | None,
    typer.Option("--column", metavar="FIELD=COLUMN", help="As data.columns, such as prompt=question; repeatable."),
]


def read_layout(columns: list[str] | None) -> RowLayout:
    from toolwise.data.row_layout import RowLayout

    pairs = [option.partition("=") for option in columns or ()]
    for name, equals, column in pairs:
        if not (name and equals and column):
            raise ConfigError(f"--column {name + equals + column!r}: write it as field=column, such as prompt=question")
    return RowLayout({name: column for name, _, column in pairs})


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
    prepare_dataset = prepare_rlla if name == "rlla" else partial(prepare_gsm8k, oracle_tool=oracle_tool)
    for path, rows in prepare_dataset(source, out or Path("data") / name).items():
        print_line(f"wrote {rows:,} rows to {path}")


@app.command()
def label(
    file: Annotated[Path, typer.Argument(help="Task file: .parquet, .jsonl or .json.")],
    base_url: Annotated[str, typer.Option(help="URL of an OpenAI-compatible server, including /v1.")] = "",
    model: Annotated[str, typer.Option(help="Name of the model on the server.")] = "",
    heuristic: Annotated[
        bool, typer.Option("--heuristic", help="Label offline, from rules and ground truths, without a model.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Output: .jsonl or .csv (labels only), or .parquet (data and labels) (default: FILE.labels.jsonl).",
            show_default=False,
        ),
    ] = None,
    tools: Annotated[list[str] | None, typer.Option(help="Tool that tasks refer to by name; repeatable.")] = None,
    api_key_env: Annotated[str, typer.Option(help="Environment variable that holds the server's API key.")] = "",
    cache: Annotated[
        Path | None, typer.Option(help="Cache of the model's answers (default: OUT.cache.jsonl).", show_default=False)
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Maximum number of concurrent requests.")] = 16,
    column: ColumnOption = None,
) -> None:
    """Label tools with families and tasks with routes, to warm-start the router. Optional."""
    from toolwise.data import load_tasks
    from toolwise.data.files import read_rows
    from toolwise.routing.labels.label_files import count_routes, write_columns, write_labels
    from toolwise.routing.labels.labeler import label_by_rules
    from toolwise.tools.catalog import build_tools

    out = out or file.with_name(f"{file.stem}.labels.jsonl")
    if out.suffix.lower() not in (".jsonl", ".csv", ".parquet"):
        raise ConfigError(f"--out {out}: labels are written as .jsonl, .csv or .parquet")
    if os.path.realpath(out) == os.path.realpath(file):
        raise ConfigError(f"--out {out} is the input file: choose another path, the input is never overwritten")
    built = build_tools(tools or [])
    tasks = load_tasks(file, layout=read_layout(column))
    if heuristic:
        result = label_by_rules(tasks, built)
    else:
        answers = cache or out.with_name(f"{out.name}.cache.jsonl")
        result = _ask_model(tasks, built, base_url, model, api_key_env, answers, concurrency)
    if out.suffix.lower() == ".parquet":
        write_columns(read_rows(file), result.labels, out)
    else:
        write_labels(result.labels, out)
    counts = ", ".join(f"{route} {count:,}" for route, count in count_routes(result.labels).items())
    print_line(f"labelled {len(result.labels):,} rows: {counts}; wrote {out}")
    if not heuristic:
        print_line(f"asked {result.asked:,} questions, answered {result.from_cache:,} from the cache")
    if result.failed:
        name, reason = result.failed[0]
        print_line(
            f"{len(result.failed):,} questions were not answered, first {name[:80]}: {reason}; run the same command "
            "again to retry only these",
            err=True,
        )
        raise typer.Exit(1)


@app.command()
def stats(
    file: Annotated[Path, typer.Argument(help="Task file: .parquet, .jsonl or .json.")],
    column: ColumnOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check every row of a task file and summarize its contents."""
    from toolwise.data.stats import describe_tasks, stats_table
    from toolwise.terminal.display import Console

    description = describe_tasks(file, read_layout(column))
    if as_json:
        print_json(description)
    else:
        Console().print(stats_table(description))


def _ask_model(
    tasks: Sequence[Task],
    tools: Mapping[str, BaseTool],
    base_url: str,
    model: str,
    api_key_env: str,
    cache: Path,
    concurrency: int,
) -> LabellingResult:
    from toolwise.concurrency import deadlines
    from toolwise.remote.endpoint import Endpoint, read_api_key
    from toolwise.routing.labels.labeler import AnswerCache, label_by_model
    from toolwise.terminal.display import Console, Status

    if not base_url or not model:
        raise ConfigError("give --base-url URL and --model NAME, or --heuristic to label without a model")
    endpoint = Endpoint(
        f"{base_url.rstrip('/')}/chat/completions",
        api_key=read_api_key(api_key_env, "--api-key-env"),
        max_concurrent=concurrency,
    )
    numbers = count(1)

    async def work(answers: AnswerCache) -> LabellingResult:
        with Status(Console(stderr=True)) as status:
            try:
                return await label_by_model(
                    tasks,
                    endpoint,
                    model,
                    answers,
                    tools,
                    on_answer=lambda: status.update(f"{next(numbers):,} answers"),
                )
            finally:
                await endpoint.aclose()

    return deadlines.run(work(AnswerCache(cache)))
