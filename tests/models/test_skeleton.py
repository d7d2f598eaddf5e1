"""Sizes and engine path of a model without its weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES, build
from selection import quick_first

from toolwise.engine import engine_path
from toolwise.models import BUILTIN, load_model
from toolwise.models.skeleton import load_skeleton, small_copy

PUBLISHED = {
    "Llama-3.1-8B": ("Llama", {"rope_theta": 5e5}, "toolwise-fast"),
    "Qwen2.5-7B": (
        "Qwen2",
        {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 28},
        "toolwise-fast",
    ),
    "Gemma-3-27B": (
        "Gemma3Text",
        {"hidden_size": 5376, "num_attention_heads": 32, "num_key_value_heads": 16, "num_hidden_layers": 62},
        "toolwise-fast",
    ),
    "Qwen3-30B-A3B": ("Qwen3Moe", {"num_experts": 128, "num_hidden_layers": 48}, "toolwise-general"),
    "gpt-oss-120b": ("GptOss", {}, "toolwise-general"),
    "DeepSeek-V3": ("DeepseekV3", {}, "toolwise-general"),
    "BLOOM": ("Bloom", {"hidden_size": 14336, "n_head": 112, "n_layer": 70}, "transformers"),
}


def test_the_sizes_are_those_of_the_loaded_model() -> None:
    skeleton = load_skeleton("builtin:small", dtype="float32")
    model, _ = load_model("builtin:small", device="cpu")
    assert {name: tuple(p.shape) for name, p in skeleton.named_parameters()} == {
        name: tuple(p.shape) for name, p in model.named_parameters()
    }
    assert all(parameter.is_meta for parameter in skeleton.parameters())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_small_copy_takes_the_path_of_its_model(name: str) -> None:
    assert engine_path(small_copy(build(name)))[0] == ARCHITECTURES[name].engine


@pytest.mark.parametrize("name", quick_first(PUBLISHED, list(PUBLISHED)[:2]))
def test_the_path_of_a_large_model_needs_little_memory(name: str) -> None:
    import transformers

    prefix, sizes, expected = PUBLISHED[name]
    config = getattr(transformers, f"{prefix}Config")(**sizes)
    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    assert sum(p.numel() for p in skeleton.parameters()) > 3e9
    small = small_copy(skeleton)
    assert sum(p.numel() for p in small.parameters()) < 60e6
    assert engine_path(small)[0] == expected


def test_random_numbers_of_the_run_stay_as_they_are() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    small_copy(load_skeleton(str(Path(BUILTIN / "small")), dtype="float32"))
    assert torch.equal(torch.rand(4), expected)
