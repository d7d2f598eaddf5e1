"""`toolwise sft`: teach a model on conversations before reinforcement learning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolwise.terminal import print_line


def sft(
    data: Annotated[Path, typer.Argument(help="Conversations: JSONL or Parquet with `messages`.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Where to save the model.", show_default=False)],
    model: Annotated[str, typer.Option(help="The model to start from.")] = "builtin:small",
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps.")] = 200,
    lr: Annotated[float, typer.Option(min=0.0, help="Peak learning rate.")] = 1e-4,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens a step.")] = 8192,
    row_tokens: Annotated[int, typer.Option(min=8, help="Tokens a packed row.")] = 1024,
    lora_rank: Annotated[int, typer.Option(min=0, help="Teach adapters of this rank and merge them; 0: all.")] = 0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that the model's folder brings: read it first.")
    ] = False,
) -> None:
    """Supervised learning: loss on what the assistant wrote, rows packed end to end."""
    from toolwise.api import sft as teach

    figures = teach(
        model,
        data,
        out,
        steps=steps,
        lr=lr,
        batch_tokens=batch_tokens,
        row_tokens=row_tokens,
        lora_rank=lora_rank,
        seed=seed,
        trust_remote_code=trust_remote_code,
        progress=True,
    )
    print_line(f"{out}: loss {figures['first_loss']:.3f} → {figures['loss']:.3f} over {steps} steps")
