"""`toolwise data label`: label tasks by a model or by rules, write the labels and report."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from toolwise.errors import ConfigError
from toolwise.terminal import print_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from toolwise.routing.labels.labeler import LabellingResult
    from toolwise.tools.base import BaseTool
    from toolwise.types import Task


@dataclass(frozen=True, slots=True)
class LabelOptions:
    """The model to ask, and how."""

    base_url: str
    model: str
    api_key_env: str = ""
    cache: Path | None = None
    concurrency: int = 16


def label_file(file: Path, out: Path, tools: Sequence[str], options: LabelOptions | None) -> None:
    """Label `file` by a model, or by rules if `options` is None. Exits with status 1 if questions went unanswered."""
    from toolwise.data import load_tasks
    from toolwise.data.files import read_rows
    from toolwise.routing.labels.label_files import count_routes, write_columns, write_labels
    from toolwise.routing.labels.labeler import label_by_rules
    from toolwise.tools.catalog import build_tools

    if out.suffix.lower() not in (".jsonl", ".csv", ".parquet"):
        raise ConfigError(f"--out {out}: labels are written as .jsonl, .csv or .parquet")
    if os.path.realpath(out) == os.path.realpath(file):
        raise ConfigError(f"--out {out} is the input file: choose another path, the input is never overwritten")
    built = build_tools(tools)
    tasks = load_tasks(file)
    result = label_by_rules(tasks, built) if options is None else _ask_model(tasks, options, out, built)
    if out.suffix.lower() == ".parquet":
        write_columns(read_rows(file), result.labels, out)
    else:
        write_labels(result.labels, out)
    counts = ", ".join(f"{route} {count:,}" for route, count in count_routes(result.labels).items())
    print_line(f"labelled {len(result.labels):,} rows: {counts}; wrote {out}")
    if options is not None:
        print_line(f"asked {result.asked:,} questions, answered {result.from_cache:,} from the cache")
    if result.failed:
        name, reason = result.failed[0]
        print_line(
            f"{len(result.failed):,} questions were not answered, first {name[:80]}: {reason}; run the same command "
            "again to retry only these",
            err=True,
        )
        raise typer.Exit(1)


def _ask_model(
    tasks: Sequence[Task], options: LabelOptions, out: Path, tools: Mapping[str, BaseTool]
) -> LabellingResult:
    from toolwise.concurrency import deadlines
    from toolwise.policies.openai.endpoint import Endpoint
    from toolwise.routing.labels.cache import AnswerCache
    from toolwise.routing.labels.labeler import label_by_model
    from toolwise.terminal.display import Console, Status

    if not options.base_url or not options.model:
        raise ConfigError("give --base-url URL and --model NAME, or --heuristic to label without a model")
    key = os.environ.get(options.api_key_env) if options.api_key_env else None
    if options.api_key_env and not key:
        raise ConfigError(
            f"the environment variable {options.api_key_env} is not set: set it, or leave --api-key-env out"
        )
    endpoint = Endpoint(
        f"{options.base_url.rstrip('/')}/chat/completions", api_key=key, max_concurrent=options.concurrency
    )
    cache = AnswerCache(options.cache if options.cache is not None else out.with_name(f"{out.name}.cache.jsonl"))
    answered = 0

    async def work() -> LabellingResult:
        with Status(Console(stderr=True)) as status:

            def count_answer() -> None:
                nonlocal answered
                answered += 1
                status.update(f"{answered:,} answers")

            try:
                return await label_by_model(tasks, endpoint, options.model, cache, tools, on_answer=count_answer)
            finally:
                await endpoint.aclose()

    try:
        return deadlines.run(work())
    finally:
        cache.close()
