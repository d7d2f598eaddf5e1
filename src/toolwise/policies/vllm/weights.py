"""The learner's weights as a folder that vLLM reads: written whole under a fresh name, so that a server that is still
reading the last ones is not disturbed."""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from toolwise.errors import PolicyError
from toolwise.serialization.files import disk_fault
from toolwise.serialization.json_text import json_text


class WeightsFolder:
    """`parent` is a place that both processes see; a temporary one where it is None."""

    def __init__(self, parent: Path | None = None) -> None:
        try:
            if parent is not None:
                parent.mkdir(parents=True, exist_ok=True)
            self.path = Path(tempfile.mkdtemp(prefix="toolwise-weights-", dir=parent))
        except OSError as fault:
            raise PolicyError(f"rollout.vllm.weights_dir: {fault}") from fault
        self.path.chmod(0o755)  # a server under another account reads here too
        self._written: list[Path] = []
        self._remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def write(self, model: Any, state: Mapping[str, torch.Tensor] | None = None) -> Path:
        """`state` takes the place of the model's own."""
        folder = self.path / f"{len(self._written)}"
        self._written.append(folder)
        try:
            model.save_pretrained(folder, state_dict=dict(state or checkpoint_state(model)))
            _untie(folder / "config.json")
        except Exception as fault:
            if not isinstance(fault, OSError) and disk_fault(fault) is None:
                raise
            raise PolicyError(
                f"the weights for vLLM cannot be written ({fault}): see rollout.vllm.weights_dir"
            ) from fault
        return folder

    def delete_old(self) -> None:
        """Those that the server has read stay: a worker of its that starts anew looks for them."""
        for folder in self._written[:-1]:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        self._remove()


@torch.no_grad()
def checkpoint_state(model: Any) -> dict[str, torch.Tensor]:
    """The model's tensors under the names of a plain checkpoint: LoRA adapters, where there are any, added in, and a
    head that shares the embeddings as a tensor of its own."""
    state: dict[str, torch.Tensor] = {}
    adapted = {name: m for name, m in model.named_modules() if hasattr(m, "get_delta_weight")}
    for name, tensor in model.state_dict().items():
        owner, _, inner = name.partition(".base_layer.")
        if not inner and any(name.startswith(f"{layer}.") for layer in adapted):
            continue  # an adapter's own
        value = tensor.detach()
        if inner == "weight":
            layer = adapted[owner]
            value = value + sum(layer.get_delta_weight(adapter) for adapter in layer.active_adapters)
        state[f"{owner}.{inner}" if inner else name] = value
    if tied := tied_names(model):
        state[tied[1]] = state[tied[0]].clone()
    return state


def tied_names(model: Any) -> tuple[str, str] | None:
    """What the embeddings and the head are called, where the two are one tensor."""
    names = {id(module): f"{name}.weight" for name, module in model.named_modules()}
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    if any(end is None for end in ends) or ends[0].weight is not ends[1].weight:
        return None
    return names[id(ends[0])], names[id(ends[1])]


def _untie(config: Path) -> None:
    """vLLM's CPU build packs a tied head once, and keeps that copy when the embeddings change; a head that is loaded
    by itself is packed anew."""
    settings = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json_text(settings | {"tie_word_embeddings": False}, indent=2), encoding="utf-8")
