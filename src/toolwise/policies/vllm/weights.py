"""Write the learner's weights to a folder that vLLM reads, each time under a new name, so that a server that is still
reading the previous ones is not disturbed."""

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
from toolwise.models.merged_weights import merged_copy
from toolwise.serialization.files import disk_fault
from toolwise.serialization.json_text import json_text


class WeightsFolder:
    """`parent` is a folder that both processes can access; None: a temporary folder."""

    def __init__(self, parent: Path | None = None) -> None:
        try:
            if parent is not None:
                parent.mkdir(parents=True, exist_ok=True)
            self.path = Path(tempfile.mkdtemp(prefix="toolwise-weights-", dir=parent))
        except OSError as fault:
            raise PolicyError(f"rollout.vllm.weights_dir: {fault}") from fault
        self.path.chmod(0o755)  # the server may run under another account
        self._written: list[Path] = []
        self._remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def write(self, model: Any, state: Mapping[str, torch.Tensor] | None = None) -> Path:
        """Write `state`, by default the model's own, and return its folder."""
        folder = self.path / f"{len(self._written)}"
        self._written.append(folder)
        try:
            model.save_pretrained(folder, state_dict=dict(state or checkpoint_state(model)))
            _untie(folder / "config.json")
        except Exception as fault:
            if not isinstance(fault, OSError) and disk_fault(fault) is None:
                raise
            raise PolicyError(
                f"the weights for vLLM cannot be written ({fault}): check rollout.vllm.weights_dir"
            ) from fault
        return folder

    def delete_old(self) -> None:
        """Delete all but the latest weights, which a restarting worker of the server reads again."""
        for folder in self._written[:-1]:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        self._remove()


@torch.no_grad()
def checkpoint_state(model: Any) -> dict[str, torch.Tensor]:
    """The model's tensors under the names of a plain checkpoint, with LoRA adapters merged and a tied head as its own
    tensor."""
    state = {name: tensor.detach() for name, tensor in merged_copy(model).state_dict().items()}
    if tied := tied_names(model):
        state[tied[1]] = state[tied[0]].clone()
    return state


def tied_names(model: Any) -> tuple[str, str] | None:
    """The names of the embedding and head weights, if the two are one tensor."""
    names = {id(module): f"{name}.weight" for name, module in model.named_modules()}
    embeddings = model.get_input_embeddings(), model.get_output_embeddings()
    if any(embedding is None for embedding in embeddings) or embeddings[0].weight is not embeddings[1].weight:
        return None
    return names[id(embeddings[0])], names[id(embeddings[1])]


def _untie(config: Path) -> None:
    """Mark the head as untied: vLLM's CPU build packs a tied head once and keeps that copy when the embeddings change;
    a head that is loaded separately is packed again."""
    settings = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json_text(settings | {"tie_word_embeddings": False}, indent=2), encoding="utf-8")
