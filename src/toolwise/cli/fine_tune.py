"""`toolwise sft`: supervised fine-tuning, from a configuration file, from flags, or both."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from toolwise.cli.train import OverridesOption, report_result, until_interrupted
from toolwise.errors import ConfigError
from toolwise.terminal import print_line

if TYPE_CHECKING:
    from toolwise.training.run_folder import RunResult

CONFIG_SUFFIXES = (".toml", ".yaml", ".yml")
NOT_SETTINGS = ("sources", "out", "model", "overrides", "resume")
"""Parameters of the command; the others have the names of settings, or the short names of `config.sft`."""


def sft(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG | [MODEL] DATA",
            help="A TOML or YAML configuration, or a file of conversations (JSONL, Parquet), after the model if any.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Output folder: the model and its run (default: runs/NAME-TIME).")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model to start from (default: builtin:small).")] = None,
    val: Annotated[Path | None, typer.Option(help="Held-out conversations for a validation loss.")] = None,
    val_fraction: Annotated[
        float | None, typer.Option(min=0.0, max=0.99, help="Hold out this share of the conversations instead.")
    ] = None,
    val_every: Annotated[int | None, typer.Option(min=0, help="Steps between validations.")] = None,
    keep_best: Annotated[
        bool | None, typer.Option("--keep-best", help="Save the model with the lowest validation loss.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps (default: 200).")] = None,
    epochs: Annotated[float | None, typer.Option(min=0.0, help="Passes over the data, instead of steps.")] = None,
    lr: Annotated[float | None, typer.Option(min=0.0, help="Peak learning rate (default: 1e-4).")] = None,
    batch_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens per step (default: 8192).")] = None,
    row_tokens: Annotated[
        int | None, typer.Option(min=8, help="Maximum tokens of a conversation (default: 1024).")
    ] = None,
    lora_rank: Annotated[
        int | None, typer.Option(min=0, help="Train LoRA adapters of this rank and merge them; 0: train all weights.")
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"] | None, typer.Option(help="Dtype of the weights (default: auto).")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Torch device (default: a GPU if there is one).")] = None,
    save_every: Annotated[int | None, typer.Option(min=1, help="Steps between checkpoints (default: 100).")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Random seed (default: 0).")] = None,
    trust_remote_code: Annotated[
        bool | None, typer.Option("--trust-remote-code", help="Run Python code from the model's folder; read it first.")
    ] = None,
    overrides: OverridesOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the last checkpoint in --out.")] = False,
) -> None:
    """Fine-tune a model on conversations: loss on assistant tokens only, conversations packed without padding."""
    settings = {name: value for name, value in locals().items() if name not in NOT_SETTINGS and value is not None}
    if resume and out is None:
        raise ConfigError("--resume needs --out DIR: the folder of the run to resume")
    config_file, named = _read_sources(sources, model)
    from toolwise.api import new_run_folder
    from toolwise.training.sft_command import read_sft_config, run_sft
    from toolwise.view.report import ReportFiles

    config = read_sft_config(config_file, **named, overrides=overrides or [], settings=settings)
    folder = out or new_run_folder(config.name)
    own = [ReportFiles()]
    report_sft(until_interrupted(lambda: run_sft(config, folder, resume=resume, own_callbacks=own), folder))


def _read_sources(sources: list[str], model: str | None) -> tuple[Path | None, dict[str, Any]]:
    """The configuration file, if one is given, and the model and data that are named."""
    if len(sources) == 1 and Path(sources[0]).suffix.lower() in CONFIG_SUFFIXES:
        return Path(sources[0]), {"model": model}
    if len(sources) == 1:
        return None, {"model": model, "data": Path(sources[0])}
    if len(sources) > 2:
        raise ConfigError(f"expected a configuration, or a model and a file of conversations, got {len(sources)} names")
    if model is not None:
        raise ConfigError(f"the model is named twice: {sources[0]} and --model {model}; give one")
    return None, {"model": sources[0], "data": Path(sources[1])}


def report_sft(result: RunResult) -> None:
    """Print how the loss changed, then what every run prints."""
    summary = result.summary
    if not result.note and summary["loss"] is not None:
        counts = summary["conversations"]
        steps = "1 step" if summary["steps"] == 1 else f"{summary['steps']} steps"
        print_line(f"{result.out}: loss {summary['first_loss']:.3f} → {summary['loss']:.3f} over {steps}")
        if long := counts["truncated"] + counts["dropped"]:
            print_line(
                f"{long} of {counts['train']} conversations were too long: {counts['truncated']} truncated, "
                f"{counts['dropped']} dropped"
            )
        tokens = summary["reply_tokens"]
        print_line(
            f"replies: {tokens['median']} tokens in the median, up to {tokens['p95']} in 95 % of them, at most "
            f"{tokens['max']}; `toolwise train` cuts them off at rollout.max_new_tokens"
        )
    report_result(result)
