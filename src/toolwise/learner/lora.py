"""LoRA (Hu et al. 2021, arXiv 2106.09685) through peft: small adapters learn, the model they sit in stays as it is."""

from __future__ import annotations

import copy
import importlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from toolwise.errors import ConfigError, MissingExtraError


@dataclass(frozen=True, slots=True)
class LoraSettings:
    rank: int = 16
    alpha: float = 32.0
    target_modules: tuple[str, ...] = ()
    """Names of layers; none: all linear ones but the head."""


class Adapters:
    """Put into `model` in place: whoever shares the model, such as the local policy, draws through them too."""

    def __init__(self, model: Any, settings: LoraSettings) -> None:
        self.peft = _peft()
        config = self.peft.LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            lora_dropout=0.0,  # dropout would put the ratio off 1
            target_modules=list(settings.target_modules) or "all-linear",
            task_type="CAUSAL_LM",
        )
        try:
            self.wrapped = self.peft.get_peft_model(model, config)
        except ValueError as fault:
            reason = str(fault).splitlines()[0]
            raise ConfigError(f"actor.lora.target_modules does not fit {type(model).__name__}: {reason}") from fault
        self.wrapped.eval()

    def disabled(self) -> AbstractContextManager[None]:
        """The model as it is without them."""
        found: AbstractContextManager[None] = self.wrapped.disable_adapter()
        return found

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
