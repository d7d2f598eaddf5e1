"""Exports a run or a checkpoint to an agent folder. Plain `transformers` loads its model, whose weights keep their
dtype or are converted. With LoRA, the adapters alone can be exported; plain `peft` loads them.

The folder is written atomically and test-loaded first.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolwise.agent.export.card import TOOL_TEXT, model_card, public_name
from toolwise.agent.export.dtype import convert, saved_dtype, weight_files
from toolwise.agent.sources import find_checkpoint, find_run, is_model
from toolwise.config.loader import apply_overrides
from toolwise.config.schema import RunConfig, load_config
from toolwise.errors import CheckpointError, ConfigError, ModelError
from toolwise.learner.lora import write_adapters
from toolwise.models import load_model, locate
from toolwise.models.adapters import write_base
from toolwise.models.folder import is_adapters
from toolwise.rollout.tool_prompt import describe_tools
from toolwise.routing.head import ROUTER_METADATA_FILE
from toolwise.serialization.files import disk_fault
from toolwise.tools.catalog import build_tools, read_tools, write_tools
from toolwise.training.agent_bundle import (
    AGENT_FIELDS,
    CODE,
    DOCUMENTS,
    brings_code,
    record_settings,
    unknown_settings,
    write_bundle,
)
from toolwise.training.checkpoint import Checkpoint
from toolwise.training.checkpoint.agent_manifest import AGENT_FILE, write_manifest

BUNDLE = (AGENT_FILE, CODE, DOCUMENTS)
"""What a checkpoint's agent has besides its model and router."""
MERGE_TOLERANCE = 1e-2
"""Adapters in another dtype than they were trained in give slightly other weights."""


@dataclass(frozen=True, slots=True)
class Export:
    out: Path
    step: int
    dtype: str


def export_model(
    source: Path,
    out: Path,
    *,
    dtype: str | None = None,
    best: str = "",
    adapters: bool = False,
    overrides: Sequence[str] = (),
    trust_code: bool = False,
) -> Export:
    """Write the agent of `source` to `out`: a run's folder, one of its checkpoints, an agent folder, a plain model, or
    the name of either on a hub.

    For a run, exports the latest checkpoint, or the best by the validation metric `best` ("-cost": the lowest). The
    weights keep their dtype unless `dtype` ("float32", "bfloat16", "float16") is given. With `adapters`, the LoRA
    adapters instead of the model with the adapters merged in. `overrides` change settings that an agent has. Nothing
    that a source brings is run, unless `overrides` change the tools: then `trust_code` is needed as for loading it.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} already exists: choose another --out, nothing is ever overwritten")
    check_agent_settings(overrides)
    _check_outside(out, source)
    if is_model(source):
        if best or adapters:
            raise ConfigError(f"{source} is not a run: leave --best and --adapters out")
        from toolwise.agent.export.copy import write_copy

        with _new_folder(out) as folder:
            step, saved_in = write_copy(folder, source, dtype, overrides, trust_code=trust_code)
        return Export(out, step, dtype or saved_in)
    run = find_run(source, "has no config.toml: give a run, RUN/checkpoints/step-…, an agent folder, or a model")
    source_checkpoint = find_checkpoint(source, best=best, command="toolwise export")
    check_router_settings(overrides, source_checkpoint.path / "model")
    config = load_config(run / "config.toml", overrides)
    if adapters and not config.actor.lora.rank:
        raise ConfigError(f"{run} has no adapters, since actor.lora.rank is 0: export its model without --adapters")
    try:
        with _new_folder(out) as folder:
            saved_in = _write_export(folder, source_checkpoint, config, run, dtype, adapters, overrides)
    except FileNotFoundError as fault:
        if source_checkpoint.path.exists():
            raise
        raise CheckpointError(
            f"{source_checkpoint.path} was removed by its run while it was being read: try again"
        ) from fault
    return Export(out, source_checkpoint.step, dtype or saved_in)


def _check_outside(out: Path, source: Path) -> None:
    """A file more in an agent folder or among checkpoints would make them invalid."""
    folders = [source] if is_model(source) else [source / "checkpoints", *source.parents[:1]]
    for folder in folders:
        inside = folder.name == "checkpoints" or folder == source
        if inside and out.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"{out} is inside {folder}, which must stay as it is: choose another --out")


def check_agent_settings(overrides: Sequence[str]) -> None:
    """Raise if an override is not of a setting that an agent has, or that finds its model."""
    fields = AGENT_FIELDS | {"router": True, "model": AGENT_FIELDS["model"] | {"base", "revision"}}
    for name in unknown_settings(apply_overrides({}, overrides), fields):
        raise ConfigError(f"--set {name}: an agent has no such setting, so an export cannot store it")


def check_router_settings(overrides: Sequence[str], model: Path) -> None:
    """Raise if an override is of the router, but the model has none: nothing would ever read it."""
    if (model / ROUTER_METADATA_FILE).is_file():
        return
    for override in overrides:
        if override.partition("=")[0].strip().partition(".")[0] == "router":
            raise ConfigError(f"--set {override}: this agent has no router, so the setting has no effect; leave it out")


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder that becomes `out` if nothing fails, and leaves nothing behind if something does."""
    temporary = out.with_name(f".{out.name}.tmp-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if out.exists():
            out.rmdir()
        temporary.rename(out)
    except FileNotFoundError:
        raise
    except Exception as fault:
        if (reason := disk_fault(fault)) is None:
            raise
        raise ModelError(f"cannot write {out}: {reason}; nothing was left behind") from fault
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_export(
    folder: Path,
    source: Checkpoint,
    config: RunConfig,
    run: Path,
    dtype: str | None,
    adapters: bool,
    overrides: Sequence[str],
) -> str:
    """Writes everything into `folder`; returns the dtype the weights were saved in."""
    model = source.path / "model"
    if not (model / "config.json").is_file():
        raise CheckpointError(f"{model} has no config.json: the checkpoint has no model to export")
    left_out = set(_model_files(model)) if adapters else set()
    for path in sorted(model.rglob("*")):
        name = path.relative_to(model)
        if name.parts[0] in BUNDLE:  # written again, from the settings
            continue
        if path.is_dir():
            (folder / name).mkdir()
        elif path not in left_out:
            shutil.copyfile(path, folder / name)
    record_settings(folder, config, overrides)
    settings = write_bundle(config, folder)
    if changes_tools(overrides):
        write_tools(folder, build_tools(config.tools))
    if adapters:
        base = _adapters_base(config)
        write_adapters(folder, config.actor.lora, source.part("actor")["adapters"], public_name(config.model.path))
        write_base(folder, public_name(config.model.path), config.model.revision, base)
    saved_in = saved_dtype(folder)
    if dtype is not None and dtype != saved_in:
        convert(folder, dtype)
    if not adapters and not (folder / "generation_config.json").exists():
        _write_generation_config(folder, trusted=config.model.trust_remote_code)
    loaded, chat = load_export(folder, config, dtype or saved_in, str(base) if adapters else "")
    if adapters:
        _check_adapters(load_export(model, config, dtype or saved_in)[0], folder, loaded)
    prompt, tools = None, list(read_tools(folder).values())
    if tools:
        prompt = chat.set_tool_prompt(config.rollout.tool_prompt, config.rollout.tool_parser)
        if prompt.where in ("system", "user"):
            (folder / TOOL_TEXT).write_text(describe_tools(tools, prompt.form), encoding="utf-8")
    (folder / "README.md").write_text(
        model_card(
            config,
            source,
            run,
            dtype=dtype or saved_in,
            saved_in=saved_in,
            tool_prompt=prompt,
            adapters=adapters,
            routed=(folder / ROUTER_METADATA_FILE).is_file(),
            code=brings_code(settings),
        ),
        encoding="utf-8",
    )
    write_manifest(folder, config.name, source.step, settings)
    return saved_in


def changes_tools(overrides: Sequence[str]) -> bool:
    return any(override.partition("=")[0].strip() == "tools" for override in overrides)


def _adapters_base(config: RunConfig) -> Path:
    """The folder of the model that the run's adapters were trained on."""
    try:
        base = Path(locate(config.model.path, config.model.revision))
    except ModelError as fault:
        raise ModelError(f"adapters are exported with a checksum of their base model: {fault}") from None
    if is_adapters(base):
        raise ModelError(f"{base}, which the run began with, holds adapters itself: export without --adapters")
    return base


def load_export(folder: Path, config: RunConfig, dtype: str, base: str = "") -> tuple[Any, Any]:
    """The exported model and its chat, which shows that they load."""
    try:
        return load_model(
            str(folder),
            device="cpu",
            dtype=dtype,
            base=base,
            trust_remote_code=config.model.trust_remote_code,
            template_kwargs=config.model.template_kwargs,
        )
    except ModelError as fault:
        raise ModelError(f"the exported model does not load, so it was removed: {fault}") from fault


def _check_adapters(model: Any, folder: Path, merged: Any = None) -> None:
    """Raise unless peft finds a place in `model`, which has the base model's layers, for each of the adapters, and
    `merged`, their base model with them, is the trained model."""
    import torch
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors.torch import load_file

    if merged is not None:
        trained = model.state_dict()
        for name, weight in merged.state_dict().items():
            if (weight - trained[name]).abs().max() > MERGE_TOLERANCE * trained[name].abs().max():
                raise ModelError(
                    f"the adapters and their base model do not give the trained {name}: has the base model changed "
                    "since the run? Export without --adapters"
                )
    saved = load_file(folder / "adapter_model.safetensors")
    wrapped = PeftModel.from_pretrained(model, folder, autocast_adapter_dtype=False)
    loaded = get_peft_model_state_dict(wrapped, save_embedding_layers=False)  # "auto" asks the hub for the base model
    if saved.keys() != loaded.keys() or not all(torch.equal(loaded[name], saved[name]) for name in saved):
        raise ModelError("the exported adapters do not load with peft, so they were removed: export without --adapters")


def _model_files(folder: Path) -> list[Path]:
    """The files of the model itself, not of its tokenizer, tools and router."""
    files = [folder / "config.json", folder / "generation_config.json", *weight_files(folder)]
    return [*files, *folder.glob("*.safetensors.index.json"), *folder.glob("*.py")]


def _write_generation_config(folder: Path, *, trusted: bool) -> None:
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trusted)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
