"""The configuration of `toolwise sft`. The field docstrings are the source of docs/settings.md."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from toolwise.config.loader import Section, apply_overrides, build_config, read_settings
from toolwise.config.paths import resolve_paths
from toolwise.config.rollout import ChatConfig
from toolwise.config.schema import LoraConfig, ModelConfig
from toolwise.config.trainer import ObserverSettings
from toolwise.errors import ConfigError


class SftDataConfig(Section):
    train: Path | None = None
    """Conversations: a JSONL, JSON or Parquet file with a column `messages`, or `prompt` and `response` (or
    `completion`), and maybe `tools`."""
    val: Path | None = None
    """Held-out conversations for the validation loss; never trained on."""
    val_fraction: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Instead of `val`: hold out this share of the conversations, chosen by `seed`."""

    @model_validator(mode="after")
    def _check_one_given(self) -> SftDataConfig:
        if self.val is not None and self.val_fraction:
            raise ValueError("set only one of val and val_fraction")
        return self


class SftTrainerConfig(ObserverSettings):
    save_every: PositiveInt = 100
    """Steps between checkpoints."""
    keep_checkpoints: PositiveInt = 1
    """Number of latest checkpoints to keep."""
    keep_best: bool = False
    """Also keep the checkpoint with the lowest validation loss; at the end, its model is saved instead of the last."""


class SftConfig(Section):
    """One run of supervised fine-tuning."""

    kind: Literal["sft"] = "sft"
    """Tells this configuration from one of `toolwise train`."""
    name: str = "sft"
    """Name of the run and of its default folder."""
    seed: int = Field(default=0, ge=0)
    """Random seed: order of the conversations, held-out share, adapters."""
    deterministic: bool = False
    """One thread and deterministic kernels: the same run gives the same numbers again."""
    steps: PositiveInt = 200
    """Optimizer steps."""
    epochs: PositiveFloat | None = None
    """Passes over the conversations, instead of `steps`: give one of them."""
    batch_tokens: PositiveInt = 8192
    """Tokens per step, at most: an epoch is divided into steps of about equal size."""
    row_tokens: int = Field(default=1024, ge=2)
    """Maximum tokens of a row, that is, of one conversation."""
    too_long: Literal["truncate", "drop"] = "truncate"
    """What happens to a longer one: its first `row_tokens` tokens are used, if there is a reply among them, or none."""
    lr: float = Field(default=1e-4, ge=0.0)
    """Peak learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Schedule after the warm-up."""
    warmup: float = Field(default=0.05, ge=0.0, le=1.0)
    """Share of the steps for linear warm-up."""
    min_lr_ratio: float = Field(default=0.1, ge=0.0, le=1.0)
    """Learning rate at the end, as a share of the peak."""
    weight_decay: float = Field(default=0.01, ge=0.0)
    """Weight decay of the optimizer."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradient clipping norm."""
    spike_factor: float = Field(default=20.0, ge=0.0)
    """Skip a step whose gradient norm exceeds max_grad_norm and this many times its running median; 0: never skip."""
    micro_batch_tokens: PositiveInt | None = None
    """Tokens per forward and backward pass; affects speed and memory, never the result. Unset: 16,384, on a GPU up to
    65,536 if such a pass is estimated to take less than two fifths of its memory."""
    share_prefixes: bool = True
    """Compute beginnings that several conversations share, such as a system prompt, once."""
    logit_chunk_tokens: PositiveInt | None = None
    """Tokens whose logits are materialized at a time; unset: 1,024, on a GPU as many as fit in half a GiB."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass instead of storing them."""
    val_every: int = Field(default=0, ge=0)
    """Compute the validation loss every `val_every` steps; 0: only before and after training."""
    model: ModelConfig = ModelConfig()
    data: SftDataConfig = SftDataConfig()
    rollout: ChatConfig = ChatConfig()
    lora: LoraConfig = LoraConfig()
    trainer: SftTrainerConfig = SftTrainerConfig()

    @property
    def warmup_steps(self) -> int:
        return int(self.warmup * self.steps)

    @property
    def validates(self) -> bool:
        return self.data.val is not None or self.data.val_fraction > 0.0


SHORT_NAMES = {
    "lora_rank": "lora.rank",
    "lora_alpha": "lora.alpha",
    "device": "model.device",
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "progress": "trainer.console",
    "val": "data.val",
    "val_fraction": "data.val_fraction",
    "save_every": "trainer.save_every",
    "keep_best": "trainer.keep_best",
}
"""Flags of the command line and keyword arguments of `toolwise.sft` that set something inside a table."""

LENGTHS = ("steps", "epochs")

MUTABLE_SFT_SETTINGS = frozenset(
    {
        "name",
        "deterministic",
        "model.device",
        "model.threads",
        "steps",
        "epochs",
        "lr",
        "lr_schedule",
        "warmup",
        "min_lr_ratio",
        "max_grad_norm",
        "spike_factor",
        "micro_batch_tokens",
        "share_prefixes",
        "logit_chunk_tokens",
        "activation_checkpointing",
        "val_every",
        "trainer.save_every",
        "trainer.keep_checkpoints",
        "trainer.keep_best",
        "trainer.console",
        "trainer.trackers",
        "trainer.callbacks",
        "trainer.observer_timeout_s",
    }
)
"""Settings that may change when an SFT run is resumed. Others decide which conversations a step sees, or what they
mean."""


def load_sft_config(
    path: str | Path, overrides: Sequence[str] = (), settings: Mapping[str, Any] | None = None
) -> SftConfig:
    """Load a configuration from a TOML or YAML file; `settings` and `a.b=c` overrides take precedence.

    Paths in the file are relative to the file, others to the working directory.
    """
    file_settings = resolve_paths(read_settings(path), Path(path).resolve().parent)
    return build_sft_config(file_settings, settings or {}, overrides, source=str(path))


def build_sft_config(
    settings: Mapping[str, Any], changes: Mapping[str, Any], overrides: Sequence[str] = (), *, source: str
) -> SftConfig:
    """`settings` with `changes`, which may have `SHORT_NAMES`, and `a.b=c` overrides."""
    merged = copy.deepcopy(dict(settings))
    _choose_length(merged, {**changes, **apply_overrides({}, overrides)}, source)
    for key, value in changes.items():
        *tables, name = SHORT_NAMES.get(key, key).split(".")
        table: Any = merged
        for depth, section in enumerate(tables, start=1):
            table = table.setdefault(section, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{source}: `{'.'.join(tables[:depth])}` must be a table")
        is_table = isinstance(value, Mapping) and isinstance(table.get(name), dict)
        table[name] = {**table[name], **value} if is_table else value
    return build_config(SftConfig, apply_overrides(merged, overrides), source=source)


def _choose_length(settings: dict[str, Any], given: Mapping[str, Any], source: str) -> None:
    """Steps or epochs that are given replace both in `settings`. The file of a run has the default steps beside its
    epochs."""
    layer = given if any(given.get(name) is not None for name in LENGTHS) else settings
    steps, epochs = (layer.get(name) for name in LENGTHS)
    if layer is settings and steps == SftConfig.model_fields["steps"].default:
        steps = None
    if steps is not None and epochs is not None:
        raise ConfigError(
            f"{source}: steps = {steps} and epochs = {epochs} are both given, but each says how long the run is: give "
            "one of them"
        )
    if layer is given:
        for name in LENGTHS:
            settings.pop(name, None)


def is_sft_config(path: Path) -> bool:
    """Whether a configuration file says that it is one of `toolwise sft`; those of run folders always do."""
    try:
        return read_settings(path).get("kind") == "sft"
    except ConfigError:  # whoever loads it explains
        return False
