"""`toolwise cluster`: what happened on the processes of a run on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolwise.terminal import print_line

app = typer.Typer(name="cluster", help="Runs on several processes and machines.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """A group, although it has one command."""


@app.command()
def timeline(
    run: Annotated[Path, typer.Argument(help="Run folder.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="Trace to write, for ui.perfetto.dev.", show_default=False)],
) -> None:
    """Write what each process did when, from cluster.jsonl, as a trace for Perfetto."""
    from toolwise.cluster.timeline import trace_of
    from toolwise.serialization.json_text import json_text

    trace = trace_of(run)
    out.write_text(json_text(trace), encoding="utf-8")
    print_line(f"wrote {len(trace['traceEvents']):,} events to {out}")
