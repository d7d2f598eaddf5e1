"""A run, typed: what a configuration file may say. Every field is documented here and nowhere else."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from toolwise.settings import apply_overrides, build, read_settings


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelConfig(Section):
    path: str = "builtin:small"
    """A folder in Hugging Face's form, a hub name, or "builtin:small", the model that ships."""
    device: str = "auto"
    """"auto" takes a GPU where there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"


class DataConfig(Section):
    train: Path | None = None
    """Parquet or JSONL of tasks to learn from."""
    val: Path | None = None
    """Held-out tasks, never learned from."""
    batch_size: PositiveInt = 16
    """Tasks a step."""
    shuffle: bool = True
    drop_last: bool = True
    limit: PositiveInt | None = None
    """Read only the first so many training rows."""
    val_limit: PositiveInt | None = None


class RolloutConfig(Section):
    n: PositiveInt = 8
    """Rollouts a task: the group that advantages are compared within."""
    do_sample: bool = True
    temperature: PositiveFloat = 1.0
    max_new_tokens: PositiveInt = 256
    """Tokens a turn at most."""
    tool_parser: Literal["hermes", "none"] = "hermes"
    """How calls are read from what the model writes; "none" leaves text as it is (RLLA: nothing executes)."""
    max_batch: PositiveInt = 256
    """Requests that generate together at most."""
    max_concurrent: PositiveInt = 1024
    deadline_s: PositiveFloat = 600.0
    """Wall-clock time an episode may take, tools and all."""


class MultiTurnConfig(Section):
    enable: bool = True
    """False: one reply a rollout, and no tools."""
    max_turns: PositiveInt = 10
    tool_timeout_s: PositiveFloat = 30.0


class RewardPart(Section):
    function: str
    kwargs: dict[str, Any] = Field(default_factory=dict)
    weight: float = 1.0


class RewardConfig(Section):
    function: str = ""
    """package.module:function, path/to/file.py:function, or a module or file with one function marked as a reward"""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    parts: list[RewardPart] = Field(default_factory=list)
    """Several rewards in place of `function`: [[reward.parts]] tables of function, weight and kwargs."""
    combine: Literal["sum", "normalize"] = "sum"
    """Add the parts by weight as they are, or each normalised within its group first."""
    max_error_rate: float = Field(default=0.2, ge=0.0, le=1.0)
    """The run stops when more than this share of a step's rollouts could not be scored."""


class AlgorithmConfig(Section):
    adv_estimator: Literal["grpo"] = "grpo"
    norm_adv_by_std: bool = True
    zero_std_groups: Literal["drop", "keep", "refill"] = "drop"
    """Groups whose rewards are all equal teach nothing: leave them out, keep them, or roll out more tasks instead."""
    max_refills: PositiveInt = 3
    """With "refill": further batches of tasks a step at most."""


class ActorConfig(Section):
    lr: PositiveFloat = 1e-6
    warmup_steps: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.0, ge=0.0)
    max_grad_norm: PositiveFloat = 1.0
    clip_ratio_low: PositiveFloat = 0.2
    clip_ratio_high: PositiveFloat = 0.2
    entropy_coef: float = Field(default=0.0, ge=0.0)
    ppo_epochs: PositiveInt = 1
    mini_batches: PositiveInt = 1
    """Optimiser steps an epoch."""
    micro_batch_tokens: PositiveInt = 16_384
    """Tokens in memory at a time; changes speed and memory, never the result."""


class ValidationConfig(Section):
    do_sample: bool = False
    every: int = Field(default=0, ge=0)
    """Validate every so many steps; 0: only before and after."""
    before: bool = True


class TrainerConfig(Section):
    total_steps: PositiveInt = 100
    save_every: PositiveInt = 10
    keep_checkpoints: PositiveInt = 2
    console: bool = True


class RunConfig(Section):
    """One training run."""

    name: str = "run"
    seed: int = Field(default=0, ge=0)
    deterministic: bool = False
    """One thread, all rollouts turn by turn in a fixed order: the same run again gives the same figures."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    tools: list[str | dict[str, Any]] = Field(default_factory=list)
    """Built-in names, references, or tables {name = …, price = …, …}."""
    rollout: RolloutConfig = RolloutConfig()
    multi_turn: MultiTurnConfig = MultiTurnConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    actor: ActorConfig = ActorConfig()
    validation: ValidationConfig = ValidationConfig()
    trainer: TrainerConfig = TrainerConfig()


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """A run from a TOML or YAML file and `a.b=c` overrides.

    Paths in the file are relative to the file, those of the overrides to the working directory.
    """
    settings = place_paths(read_settings(path), Path(path).resolve().parent)
    return build(RunConfig, apply_overrides(settings, overrides), source=str(path))


def place_paths(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """`settings` with data files, the model's folder and references to Python files taken from `folder`.

    What is no path, or of a wrong type, is left for `build` to judge.
    """
    placed = copy.deepcopy(dict(settings))
    data, model, reward, tools = (placed.get(name, {}) for name in ("data", "model", "reward", "tools"))
    if isinstance(data, dict):
        for which in ("train", "val"):
            if isinstance(data.get(which), str | Path) and str(data[which]):
                data[which] = str(folder / Path(data[which]).expanduser())
    if isinstance(model, dict) and isinstance(model.get("path"), str) and model["path"]:
        found = folder / Path(model["path"]).expanduser()
        if found.is_dir():  # anything else may be a hub's name
            model["path"] = str(found)
    if isinstance(reward, dict) and "function" in reward:
        reward["function"] = _place_reference(reward["function"], folder)
    parts = reward.get("parts") if isinstance(reward, dict) else None
    for part in parts if isinstance(parts, list) else ():
        if isinstance(part, dict) and "function" in part:
            part["function"] = _place_reference(part["function"], folder)
    for number, tool in enumerate(tools) if isinstance(tools, list) else ():
        if not isinstance(tool, dict):
            tools[number] = _place_reference(tool, folder)
        elif "name" in tool:
            tool["name"] = _place_reference(tool["name"], folder)
    return placed


def _place_reference(reference: Any, folder: Path) -> Any:
    if not isinstance(reference, str):
        return reference
    file, colon, name = (reference, "", "") if reference.endswith(".py") else reference.rpartition(":")
    return f"{folder / Path(file).expanduser()}{colon}{name}" if file.endswith(".py") else reference
