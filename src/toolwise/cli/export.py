"""`toolwise export`: write a trained model as a plain Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from toolwise.terminal import print_line


def export(
    source: Annotated[Path, typer.Argument(help="Run folder or checkpoint.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Output folder; must not exist yet.", show_default=False)],
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Dtype of the exported weights (default: as saved).", show_default=False),
    ] = None,
    best: Annotated[
        str,
        typer.Option(
            metavar="METRIC",
            help="Export the checkpoint with the best validation METRIC (score, -cost, …) instead of the latest.",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Export a run's model to a folder that transformers loads, with a model card."""
    from toolwise.agent.export import export_model

    exported = export_model(source, out, dtype=dtype, best=best)
    print_line(f"{exported.out}: model of step {exported.checkpoint.step} in {exported.dtype}; model card: README.md")
