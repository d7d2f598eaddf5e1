"""`toolwise rollouts`: the stored rollouts of a run, for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from toolwise.terminal import print_line

app = typer.Typer(name="rollouts", help="Export a run's rollouts.", no_args_is_help=True)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Run folder.", show_default=False)],
    form: Annotated[
        Literal["openai", "parquet", "sft", "preferences"],
        typer.Option(
            "--format",
            help="OpenAI chats, one Parquet row per rollout, conversations for toolwise sft, or pairs of the best and "
            "the worst rollout of a group.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="Output: .parquet for parquet, else .jsonl.", show_default=False)],
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITION",
            help="Only rollouts for which it holds: score>=1, correct=true, route=SEARCH, metrics.NAME<1, step>10, …; "
            "repeatable.",
            show_default=False,
        ),
    ] = None,
    validation: Annotated[
        bool, typer.Option("--validation", help="Export the rollouts of validations, not those of training steps.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists.")] = False,
) -> None:
    """Write a run's rollouts to a file in a format that other programs read."""
    from toolwise.training.record_filter import parse_condition
    from toolwise.training.rollout_export import describe_skipped, export_rollouts

    conditions = [parse_condition(text) for text in where or ()]
    result = export_rollouts(run, out, form, where=conditions, validation=validation, overwrite=overwrite)
    print_line(f"wrote {result.rows:,} rows to {out}")
    if result.skipped:
        print_line(f"left out: {describe_skipped(result)}", err=True)
    if not result.has_tools and form != "parquet":
        print_line(
            f"note: {run} has no checkpoint, so the schemas of its tools are not known: rows have none", err=True
        )
