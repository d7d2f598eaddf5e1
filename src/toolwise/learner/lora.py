"""LoRA (Hu et al. 2021, arXiv 2106.09685) through peft: small adapters learn, the model they sit in stays as it is."""

from __future__ import annotations

import copy
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from toolwise.errors import ConfigError, MissingExtraError
from toolwise.models.weight_sharing import shared_copy


@dataclass(frozen=True, slots=True)
class LoraSettings:
    rank: int = 16
    alpha: float = 32.0
    target_modules: tuple[str, ...] = ()
    """Names of layers; none: all linear ones but the head."""
    seed: int = 0
    """Adapters begin at random."""


class Adapters:
    """Put into `model` in place: whoever runs the model, such as the local policy, draws through them too."""

    def __init__(self, model: Any, settings: LoraSettings) -> None:
        self.peft = _peft()
        self.model = model
        config = self.peft.LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            lora_dropout=0.0,  # dropout would put the ratio off 1
            target_modules=list(settings.target_modules) or "all-linear",
            task_type="CAUSAL_LM",
        )
        try:
            with torch.random.fork_rng(devices=[]):  # its own seed, and nobody else's draws change
                torch.manual_seed(settings.seed)
                self.wrapped = self.peft.get_peft_model(model, config)
        except ValueError as fault:
            reason = str(fault).splitlines()[0]
            raise ConfigError(f"actor.lora.target_modules does not fit {type(model).__name__}: {reason}") from fault
        self.wrapped.eval()
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        if getattr(model.config, "tie_word_embeddings", False) and any(hasattr(end, "base_layer") for end in ends):
            raise ConfigError(
                "actor.lora.target_modules names the embeddings or the head, which share their weights in this model: "
                "adapters of one could not be merged without changing the other; leave both out"
            )

    def base_model(self) -> Any:
        """The model as it is without them: a copy of its modules over the same weights."""
        adapter = self.peft.tuners.tuners_utils.BaseTunerLayer

        def beneath(module: Any) -> Any:
            return module.get_base_layer() if isinstance(module, adapter) else module

        return shared_copy(self.model, substitute=beneath)

    def save_merged(self, folder: Path) -> None:
        """A plain model with the adapters added in. Merged in a copy: adding and taking away again is not exact."""
        copy.deepcopy(self.wrapped).merge_and_unload().save_pretrained(folder)

    def state_dict(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = self.peft.get_peft_model_state_dict(self.wrapped)
        return found

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.peft.set_peft_model_state_dict(self.wrapped, state)


def _peft() -> Any:
    try:
        return importlib.import_module("peft")
    except ImportError:
        raise MissingExtraError("peft", "peft") from None
