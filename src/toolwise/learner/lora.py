"""LoRA (Hu et al. 2021, arXiv 2106.09685) through peft: small adapters learn, the base model stays frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from toolwise.config.schema import LoraConfig
from toolwise.errors import ConfigError, import_extra
from toolwise.models.merged_weights import base_layer, merged_copy
from toolwise.models.weight_sharing import shared_copy


class Adapters:
    """LoRA adapters inserted into `model` in place, so the local policy samples through them too. Initialised with
    `seed`."""

    def __init__(self, model: Any, lora: LoraConfig, seed: int = 0) -> None:
        self.peft = import_extra("peft", "peft")
        self.model = model
        config = self.peft.LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=0.0,  # dropout would move the ratio off 1
            target_modules=lora.target_modules or "all-linear",
            task_type="CAUSAL_LM",
        )
        try:
            with torch.random.fork_rng(devices=[]):  # seeded, without touching the global random state
                torch.manual_seed(seed)
                self.wrapped = self.peft.get_peft_model(model, config)
        except ValueError as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"actor.lora.target_modules does not fit {type(model).__name__}: {reason}") from error
        self.wrapped.eval()
        embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
        if getattr(model.config, "tie_word_embeddings", False) and any(
            hasattr(module, "base_layer") for module in embeddings
        ):
            raise ConfigError(
                "actor.lora.target_modules includes the embeddings or the head, which share their weights in this "
                "model: merging the adapters of one would change the other; leave both out"
            )

    def base_model(self) -> Any:
        """The model without adapters: a copy of its modules over the same weights."""
        return shared_copy(self.model, substitute=base_layer)

    def save_merged(self, folder: Path) -> None:
        """Save a plain model with the adapters merged in: the weights that engine and learner compute with."""
        merged_copy(self.model).save_pretrained(folder)

    def state_dict(self) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.peft.get_peft_model_state_dict(self.wrapped)
        return state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.peft.set_peft_model_state_dict(self.wrapped, state)
