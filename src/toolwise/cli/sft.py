"""`toolwise sft`: supervised fine-tuning on conversations before reinforcement learning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolwise.terminal import print_line


def sft(
    data: Annotated[Path, typer.Argument(help="Conversations: JSONL or Parquet with `messages`.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Output folder of the model.", show_default=False)],
    model: Annotated[str, typer.Option(help="Model to start from.")] = "builtin:small",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 200,
    lr: Annotated[float, typer.Option(min=0.0, help="Peak learning rate.")] = 1e-4,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens per step.")] = 8192,
    row_tokens: Annotated[int, typer.Option(min=8, help="Tokens per packed row.")] = 1024,
    lora_rank: Annotated[
        int, typer.Option(min=0, help="Train LoRA adapters of this rank and merge them; 0: train all weights.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code from the model's folder; read it first.")
    ] = False,
) -> None:
    """Fine-tune a model on conversations: loss on assistant tokens only, conversations packed into rows."""
    from toolwise.api import sft as fine_tune

    metrics = fine_tune(
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
    print_line(f"{out}: loss {metrics['first_loss']:.3f} → {metrics['loss']:.3f} over {steps} steps")
