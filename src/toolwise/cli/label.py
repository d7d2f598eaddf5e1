"""`toolwise data label`: who is asked, what is written, and what is said of it."""

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
    """Whom to ask."""

    base_url: str
    model: str
    api_key_env: str = ""
    cache: Path | None = None
    concurrency: int = 16


def label_file(file: Path, out: Path, tools: Sequence[str], asked: LabelOptions | None) -> None:
    """`asked` is None where the rules decide. Ends with status 1 where labels are still missing for want of answers."""
    from toolwise.data import load_tasks
    from toolwise.data.files import read_rows
    from toolwise.routing.labels.label_files import count_routes, write_columns, write_labels
    from toolwise.routing.labels.labeler import label_by_rules
    from toolwise.tools.catalog import build_tools

    if out.suffix.lower() not in (".jsonl", ".csv", ".parquet"):
        raise ConfigError(f"--out {out}: labels are written as .jsonl, .csv or .parquet")
    if os.path.realpath(out) == os.path.realpath(file):
        raise ConfigError(f"--out {out} is the file itself: give another, nothing is ever overwritten")
    built = build_tools(tools)
    tasks = load_tasks(file)
    done = label_by_rules(tasks, built) if asked is None else _ask(tasks, asked, out, built)
    if out.suffix.lower() == ".parquet":
        write_columns(read_rows(file), done.labels, out)
    else:
        write_labels(done.labels, out)
    counts = ", ".join(f"{route} {count:,}" for route, count in count_routes(done.labels).items())
    print_line(f"labelled {len(done.labels):,} rows: {counts}; wrote {out}")
    if asked is not None:
        print_line(f"asked {done.asked:,} questions, {done.from_cache:,} were answered before")
    if done.failed:
        name, reason = done.failed[0]
        print_line(
            f"{len(done.failed):,} questions have no answer, first {name[:80]}: {reason}; run the same again to ask "
            "only these",
            err=True,
        )
        raise typer.Exit(1)


def _ask(tasks: Sequence[Task], asked: LabelOptions, out: Path, tools: Mapping[str, BaseTool]) -> LabellingResult:
    from toolwise.concurrency import deadlines
    from toolwise.policies.openai.endpoint import Endpoint
    from toolwise.routing.labels.cache import AnswerCache
    from toolwise.routing.labels.labeler import label_by_model
    from toolwise.terminal.display import Console, Status

    if not asked.base_url or not asked.model:
        raise ConfigError("give --base-url URL and --model NAME, or --heuristic to label without any model")
    key = os.environ.get(asked.api_key_env) if asked.api_key_env else None
    if asked.api_key_env and not key:
        raise ConfigError(
            f"there is no key in the environment's {asked.api_key_env}: set it, or leave --api-key-env out"
        )
    endpoint = Endpoint(f"{asked.base_url.rstrip('/')}/chat/completions", api_key=key, max_concurrent=asked.concurrency)
    cache = AnswerCache(asked.cache if asked.cache is not None else out.with_name(f"{out.name}.cache.jsonl"))
    answered = 0

    async def work() -> LabellingResult:
        with Status(Console(stderr=True)) as status:

            def one_more() -> None:
                nonlocal answered
                answered += 1
                status.update(f"{answered:,} answers")

            try:
                return await label_by_model(tasks, endpoint, asked.model, cache, tools, on_answer=one_more)
            finally:
                await endpoint.aclose()

    try:
        return deadlines.run(work())
    finally:
        cache.close()
