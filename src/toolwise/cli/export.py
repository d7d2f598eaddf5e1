"""`toolwise export`: a trained model as a plain Hugging Face folder."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from toolwise.terminal import print_line


class Dtype(StrEnum):
    """As torch spells them."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def export(
    source: Annotated[Path, typer.Argument(help="A run's folder, or a checkpoint of one.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The folder to write; never overwritten.", show_default=False)],
    dtype: Annotated[
        Dtype | None, typer.Option(help="Another number format than the weights were saved in.", show_default=False)
    ] = None,
    best: Annotated[
        str,
        typer.Option(
            metavar="FIGURE",
            help="Not the latest checkpoint but that of the best validation by this figure: score, -cost, …",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Write the model of a run to a folder that plain transformers loads, with a model card."""
    from toolwise.agent.export import export_model

    done = export_model(source, out, dtype=dtype.value if dtype else None, best=best)
    print_line(f"{done.out}: the model of step {done.checkpoint.step} in {done.dtype}; its card is README.md")
