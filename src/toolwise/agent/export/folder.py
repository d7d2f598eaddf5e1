"""Exports a checkpoint to an agent folder, whose model plain `transformers` loads; its weights keep their dtype or are
converted. With LoRA, the adapters alone can be exported, as a folder that plain `peft` loads.

The folder is written atomically and test-loaded first.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolwise.agent.bundle import brings_code, write_bundle
from toolwise.agent.export.card import TOOL_TEXT, model_card, public_name
from toolwise.agent.loader import find_checkpoint, find_run
from toolwise.agent.manifest import write_manifest
from toolwise.config.schema import RunConfig, inference_settings, load_config
from toolwise.errors import CheckpointError, ConfigError, ModelError
from toolwise.learner.lora import write_adapters
from toolwise.models import load_model
from toolwise.rollout.tool_prompt import describe_tools
from toolwise.routing.head import ROUTER_METADATA_FILE, ROUTER_WEIGHTS_FILE
from toolwise.serialization.files import disk_fault
from toolwise.serialization.json_text import json_text
from toolwise.tools.catalog import read_tools
from toolwise.training.checkpoint import Checkpoint

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""torch's name -> safetensors' name"""


@dataclass(frozen=True, slots=True)
class Export:
    out: Path
    checkpoint: Checkpoint
    dtype: str


def export_model(
    source: Path, out: Path, *, dtype: str | None = None, best: str = "", adapters: bool = False
) -> Export:
    """Write the model of `source`, a run's folder or one of its checkpoints, to `out`.

    For a run, exports the latest checkpoint, or the best by the validation metric `best` ("-cost": the lowest). The
    weights keep their dtype unless `dtype` ("float32", "bfloat16", "float16") is given. With `adapters`, the LoRA
    adapters instead of the model with the adapters merged in.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} already exists: choose another --out, nothing is ever overwritten")
    run = find_run(source, "has no config.toml: give the folder of a run, or RUN/checkpoints/step-…")
    source_checkpoint = find_checkpoint(source, best=best, command="toolwise export")
    config = load_config(run / "config.toml")
    if adapters and not config.actor.lora.rank:
        raise ConfigError(f"{run} has no adapters, since actor.lora.rank is 0: export its model without --adapters")
    temporary = out.with_name(f".{out.name}.tmp-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        saved_in = _write_export(temporary, source_checkpoint, config, run, dtype, adapters)
        if out.exists():
            out.rmdir()
        temporary.rename(out)
    except FileNotFoundError as fault:
        if source_checkpoint.path.exists():
            raise
        raise CheckpointError(
            f"{source_checkpoint.path} was removed by its run while it was being read: try again"
        ) from fault
    except Exception as fault:
        if (reason := disk_fault(fault)) is None:
            raise
        raise ModelError(f"cannot write {out}: {reason}; nothing was left behind") from fault
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Export(out, source_checkpoint, dtype or saved_in)


def _write_export(
    folder: Path, source: Checkpoint, config: RunConfig, run: Path, dtype: str | None, adapters: bool
) -> str:
    """Writes everything into `folder`; returns the dtype the weights were saved in."""
    model = source.path / "model"
    if not (model / "config.json").is_file():
        raise CheckpointError(f"{model} has no config.json: the checkpoint has no model to export")
    left_out = set(_model_files(model)) if adapters else set()
    for path in sorted(model.rglob("*")):
        target = folder / path.relative_to(model)
        if path.is_dir():
            target.mkdir()
        elif path not in left_out:
            shutil.copyfile(path, target)
    _record_settings(folder, config)
    settings = write_bundle(config, folder)
    if adapters:
        write_adapters(folder, config.actor.lora, source.part("actor")["adapters"], public_name(config.model.path))
    saved_in = saved_dtype(folder)
    if dtype is not None and dtype != saved_in:
        convert(folder, dtype)
    if not adapters and not (folder / "generation_config.json").exists():
        _write_generation_config(folder, trusted=config.model.trust_remote_code)
    loaded, chat = _load(model if adapters else folder, config, dtype or saved_in)
    if adapters:
        _check_adapters(loaded, folder)
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


def _load(folder: Path, config: RunConfig, dtype: str) -> tuple[Any, Any]:
    try:
        return load_model(
            str(folder),
            device="cpu",
            dtype=dtype,
            trust_remote_code=config.model.trust_remote_code,
            template_kwargs=config.model.template_kwargs,
        )
    except ModelError as fault:
        raise ModelError(f"the exported model does not load, so it was removed: {fault}") from fault


def _check_adapters(model: Any, folder: Path) -> None:
    """Raise unless peft finds a place in `model`, which has the base model's layers, for each of the adapters."""
    import torch
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors.torch import load_file

    saved = load_file(folder / "adapter_model.safetensors")
    wrapped = PeftModel.from_pretrained(model, folder, autocast_adapter_dtype=False)
    loaded = get_peft_model_state_dict(wrapped, save_embedding_layers=False)  # "auto" asks the hub for the base model
    if saved.keys() != loaded.keys() or not all(torch.equal(loaded[name], saved[name]) for name in saved):
        raise ModelError("the exported adapters do not load with peft, so they were removed: export without --adapters")


def _model_files(folder: Path) -> list[Path]:
    """The files of the model itself, not of its tokenizer, tools and router."""
    files = [folder / "config.json", folder / "generation_config.json", *_weight_files(folder)]
    return [*files, *folder.glob("*.safetensors.index.json"), *folder.glob("*.py")]


def _record_settings(folder: Path, config: RunConfig) -> None:
    """Adds the inference settings of a routed agent; checkpoints of earlier versions do not have them."""
    file = folder / ROUTER_METADATA_FILE
    if file.is_file():
        try:
            metadata = inference_settings(config) | json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, TypeError, RecursionError) as fault:
            raise CheckpointError(
                f"{file.name} of the checkpoint cannot be read ({fault}): export another checkpoint"
            ) from None
        if config.router.wording not in ("", "silent") and isinstance(metadata.get("router"), dict):
            wording = Path(config.router.wording)
            metadata["router"]["wording"] = f"wording{wording.suffix}"
            if wording.is_file():
                shutil.copyfile(wording, folder / f"wording{wording.suffix}")
        file.write_text(json_text(metadata, indent=2) + "\n", encoding="utf-8")


def _write_generation_config(folder: Path, *, trusted: bool) -> None:
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trusted)
    GenerationConfig.from_model_config(config).save_pretrained(folder)


def saved_dtype(folder: Path) -> str:
    """The dtype of most of the weights in `folder`."""
    from safetensors import safe_open

    names = {short: long for long, short in DTYPES.items()}
    count: Counter[str] = Counter()
    for file in _weight_files(folder):
        with safe_open(file, framework="pt") as weights:
            count.update(weights.get_slice(name).get_dtype() for name in weights.keys())  # noqa: SIM118
    if not count:
        raise ModelError(f"{folder} has no *.safetensors files: there are no weights to export")
    dtype = count.most_common(1)[0][0]
    if dtype not in names:
        raise ModelError(f"the weights in {folder} are {dtype}: only {', '.join(DTYPES)} can be exported")
    return names[dtype]


def convert(folder: Path, dtype: str) -> None:
    """Converts all weights in `folder` in place, and updates config.json; integer tensors stay as they are."""
    if dtype not in DTYPES:
        raise ModelError(f"--dtype is {dtype!r}: use one of {', '.join(DTYPES)}")
    sizes = [_convert_file(file, dtype) for file in _weight_files(folder)]
    for index in folder.glob("*.safetensors.index.json"):
        record = json.loads(index.read_bytes())
        record.setdefault("metadata", {})["total_size"] = sum(sizes)
        index.write_text(json_text(record, indent=2) + "\n", encoding="utf-8")
    if (folder / "config.json").is_file():  # adapters have none
        config = json.loads((folder / "config.json").read_bytes())
        _set_config_dtype(config, dtype)
        (folder / "config.json").write_text(json_text(config, indent=2) + "\n", encoding="utf-8")


def _weight_files(folder: Path) -> list[Path]:
    """The model's files; a router head next to it stays in fp32."""
    return [file for file in sorted(folder.glob("*.safetensors")) if file.name != ROUTER_WEIGHTS_FILE]


def _convert_file(file: Path, dtype: str) -> int:
    """Converts one file (a model may be larger than memory) and returns the size of its weights in bytes."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    torch_dtype: torch.dtype = getattr(torch, dtype)
    tensors: dict[str, Any] = {}
    with safe_open(file, framework="pt") as weights:
        metadata = weights.metadata() or {"format": "pt"}
        for name in weights.keys():  # noqa: SIM118
            tensor = weights.get_tensor(name)
            converted = tensor.to(torch_dtype) if tensor.is_floating_point() else tensor
            if (converted.isinf() & tensor.isfinite()).any():
                largest = float(tensor[tensor.isfinite()].abs().max())
                raise ModelError(f"{name} contains {largest:.4g}, which overflows {dtype}: use --dtype bfloat16")
            tensors[name] = converted
    temporary = file.with_name(f"{file.name}.new")
    save_file(tensors, temporary, metadata=metadata)
    shutil.copymode(file, temporary)  # safetensors creates files that only their owner can read
    temporary.replace(file)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _set_config_dtype(config: dict[str, Any], dtype: str) -> None:
    """Under the key it already has; the parts of a composite model each have their own."""
    for name in [name for name in ("dtype", "torch_dtype") if name in config] or ["dtype"]:
        config[name] = dtype
    for part in config.values():
        if isinstance(part, dict) and {"dtype", "torch_dtype"} & part.keys():
            _set_config_dtype(part, dtype)
