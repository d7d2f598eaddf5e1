"""The weights folder: a plain checkpoint with the head as a separate tensor."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from toolwise.config.schema import LoraConfig
from toolwise.errors import PolicyError
from toolwise.learner.lora import Adapters
from toolwise.policies.vllm.weights import WeightsFolder, checkpoint_state, tied_names


def test_what_is_written_is_the_model_with_an_untied_head(loaded: Any, tmp_path: Path) -> None:
    model = loaded[0]
    weights = WeightsFolder(tmp_path / "new")
    folder = weights.write(model)
    state = load_file(folder / "model.safetensors")
    assert torch.equal(state["lm_head.weight"], model.lm_head.weight)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    again = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.inference_mode():
        assert torch.equal(again(ids).logits, model(ids).logits)
    assert model.config.tie_word_embeddings is True
    weights.close()
    assert list((tmp_path / "new").iterdir()) == []


def test_a_head_of_its_own_is_nothing_to_untie(loaded: Any) -> None:
    model = copy.deepcopy(loaded[0])
    assert tied_names(model) == ("model.embed_tokens.weight", "lm_head.weight")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() + 1)
    assert tied_names(model) is None
    assert torch.equal(checkpoint_state(model)["lm_head.weight"], model.lm_head.weight)


def test_adapters_are_added_in_as_peft_merges_them(loaded: Any) -> None:
    model = copy.deepcopy(loaded[0])
    plain = {name: weight.clone() for name, weight in checkpoint_state(model).items()}
    adapters = Adapters(model, LoraConfig(rank=2, alpha=8.0, target_modules=["q_proj"]))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(generator=torch.Generator().manual_seed(0))
    found = checkpoint_state(model)
    merged = adapters.wrapped.merge_and_unload().state_dict()
    assert set(found) == set(plain)
    for name, weight in found.items():
        torch.testing.assert_close(weight, merged[name])
        assert torch.equal(weight, plain[name]) == ("q_proj" not in name)


def test_only_the_last_weights_stay(loaded: Any, tmp_path: Path) -> None:
    weights = WeightsFolder(tmp_path)
    first, second = weights.write(loaded[0]), weights.write(loaded[0])
    assert first != second
    weights.delete_old()
    assert (first.exists(), second.exists()) == (False, True)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PolicyError, match=r"rollout\.vllm\.weights_dir"):
        WeightsFolder(tmp_path / "file")
