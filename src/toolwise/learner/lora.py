"""LoRA (Hu et al. 2021, arXiv 2106.09685) through peft: small adapters learn, the base model stays frozen.

peft creates, names and stores the adapters. What engine and learner compute with are the merged weights
(`models/merged_weights.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from toolwise.config.imports import did_you_mean
from toolwise.config.schema import LoraConfig
from toolwise.errors import CheckpointError, ConfigError, import_extra
from toolwise.models.merged_weights import base_layer, is_adapter, merged_copy
from toolwise.models.weight_sharing import shared_copy

PREFIX = "base_model.model."
"""Of names in peft's files."""


class Adapters:
    """LoRA adapters inserted into `model` in place; whoever samples from the model samples through them. Initialised
    with `seed`. `section` is the table of the settings, for errors."""

    def __init__(self, model: Any, lora: LoraConfig, seed: int = 0, section: str = "actor.lora") -> None:
        self.peft = import_extra("peft", "peft")
        self.model = model
        self.lora = lora
        self.section = section
        layers = find_layers(model, lora.target_modules, section)
        _check_layers(model, lora, layers, section)
        config = self.peft.LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=0.0,  # dropout would move the ratio off 1
            target_modules=list(layers),
            task_type="CAUSAL_LM",
        )
        try:
            # Seeded, without touching the global random state.
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about layers that are transposed or fused; see _check_adapted
                torch.manual_seed(seed)
                self.wrapped = self.peft.get_peft_model(model, config)
        except ValueError as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"{section}.target_modules does not fit {type(model).__name__}: {reason}") from error
        self._check_adapted(layers)
        self.wrapped.eval()

    def _check_adapted(self, layers: Mapping[str, Any]) -> None:
        """Raise unless these layers have adapters, and nothing else has: peft may adapt the experts of a mixture in
        place of other layers with the same names."""
        adapted = {name for name, module in self.model.named_modules() if is_adapter(module)}
        if adapted == layers.keys():
            return
        self.wrapped.unload()
        wrong = {_short_name(name.removesuffix(".base_layer")) for name in adapted ^ layers.keys()}
        fine = sorted({_short_name(name) for name in layers} - {_short_name(n) for n in layers.keys() - adapted})
        raise ConfigError(
            f"{self.section}.target_modules: peft adapts the layers of {type(self.model).__name__} in another way "
            f"({', '.join(sorted(wrong))}): set it to {fine}"
        )

    def base_model(self) -> Any:
        """The model without adapters: a copy of its modules over the same weights."""
        return shared_copy(self.model, substitute=base_layer)

    def save_merged(self, folder: Path) -> None:
        """Save a plain model with the adapters merged in: the weights that engine and learner compute with."""
        merged_copy(self.model).save_pretrained(folder)

    def state_dict(self) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.peft.get_peft_model_state_dict(
            self.wrapped,
            save_embedding_layers=False,  # "auto" looks the base model up on the hub
        )
        return state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        state = _without_embeddings(state)
        own = {name: tuple(tensor.shape) for name, tensor in self.state_dict().items()}
        saved = {name: tuple(tensor.shape) for name, tensor in state.items()}
        if own != saved:
            name = min(name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name))
            raise CheckpointError(
                f"the checkpoint's adapters are others than the run's: {name} is {_shape(saved.get(name))} in the "
                f"checkpoint and {_shape(own.get(name))} in the run; use the {self.section} settings it was made with"
            )
        self.peft.set_peft_model_state_dict(self.wrapped, state)


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else " x ".join(map(str, shape))


def _without_embeddings(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Older checkpoints hold frozen embeddings beside adapters of embeddings."""
    return {name: tensor for name, tensor in state.items() if ".lora_" in name}


def write_adapters(folder: Path, lora: LoraConfig, state: Mapping[str, torch.Tensor], base: str) -> None:
    """Write adapters with this state as a folder that `peft.PeftModel.from_pretrained` loads over the model `base`."""
    from safetensors.torch import save_file

    peft = import_extra("peft", "peft")
    state = _without_embeddings(state)
    layers = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in state}
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        target_modules=lora.target_modules or sorted({_short_name(name) for name in layers}),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    )
    config.save_pretrained(folder)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "adapter_model.safetensors")


def find_layers(model: Any, targets: list[str], section: str = "actor.lora") -> dict[str, Any]:
    """The layers that adapters of these targets are for, by name: all linear ones but the head if there are none."""
    modules: dict[str, Any] = dict(model.named_modules())
    linear = {name: module for name, module in modules.items() if _is_linear(module)}
    if not targets:
        head = model.get_output_embeddings()
        if not (layers := {name: module for name, module in linear.items() if module is not head}):
            raise ConfigError(f"{section}.rank: {type(model).__name__} has no linear layers: set it to 0")
        return layers
    found: dict[str, Any] = {}
    for target in targets:
        matches = {
            name: module
            for name, module in modules.items()
            if name and (name == target or name.endswith(f".{target}")) and target
        }
        names = sorted({_short_name(name) for name in linear})
        known = f"the linear layers of {type(model).__name__} are {', '.join(names)}"
        if not matches:
            hint = did_you_mean(target, [*names, *linear])
            raise ConfigError(f"{section}.target_modules: the model has no layer {target!r}{hint} ({known})")
        for name, module in matches.items():
            if not _is_linear(module) and not isinstance(module, nn.Embedding):
                raise ConfigError(
                    f"{section}.target_modules: {name} is not a linear layer but {type(module).__name__} ({known})"
                )
        found |= matches
    return found


def _is_linear(module: Any) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D)


def _short_name(name: str) -> str:
    """The last part of a name; with the part before it if that is a number."""
    parent, _, last = name.rpartition(".")
    return f"{parent.rpartition('.')[2]}.{last}" if last.isdigit() and parent else last


def _check_layers(model: Any, lora: LoraConfig, layers: Mapping[str, Any], section: str) -> None:
    for name, layer in layers.items():
        limit = min(layer.weight.shape)
        if lora.rank > limit:
            raise ConfigError(
                f"{section}.rank is {lora.rank}, but {name} is {_shape(tuple(layer.weight.shape))}: use a rank of at "
                f"most {limit}, or leave the layer out of {section}.target_modules"
            )
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    tied = ends[1] is not None and ends[0].weight is ends[1].weight
    if tied and any(layer is end for layer in layers.values() for end in ends):
        raise ConfigError(
            f"{section}.target_modules includes the embeddings or the head, which share their weights in this "
            "model: merging the adapters of one would change the other; leave both out"
        )
