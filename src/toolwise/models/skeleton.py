"""A model without its weights: its sizes, from config.json alone, and a small random copy that computes alike.

Both are quick whatever the size of the model, so that a run can be refused before anything large is read.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from toolwise.models.adapters import find_base
from toolwise.models.folder import is_adapters, locate
from toolwise.models.loader import explained, prepare_attention
from toolwise.models.remote_code import check_hub_kernels

MAX_LAYERS, MAX_HEADS, MAX_WIDTH, MAX_VOCABULARY = 4, 4, 32, 512
WEIGHT_NOISE = 0.15
"""Large enough for the outputs of a small model to depend on every part of its formula."""


def load_skeleton(path: str, *, dtype: str, trust_remote_code: bool = False, revision: str = "", base: str = "") -> Any:
    """The model at `path` with parameters that have shapes but no values."""
    from transformers import AutoConfig, AutoModelForCausalLM

    location = locate(path, revision)
    if is_adapters(Path(location)):
        location = str(find_base(Path(location), base, verified=False))
    if not trust_remote_code:
        check_hub_kernels(path, location)
    with explained(path, location), torch.device("meta"):
        config = AutoConfig.from_pretrained(location, trust_remote_code=trust_remote_code)
        return AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code
        )


def small_copy(skeleton: Any, device: str = "cpu") -> Any:
    """A random model of the same architecture with fewer layers and heads, but heads of the same size."""
    from transformers import AutoModelForCausalLM

    config = small_config(skeleton.config.get_text_config())
    with torch.random.fork_rng(devices=[]), torch.no_grad():  # the run's own random numbers stay as they are
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * WEIGHT_NOISE)
    prepare_attention(model)
    return model.to(device=device, dtype=skeleton.dtype).eval()


def small_config(config: Any) -> Any:
    """The configuration with as few layers as show each kind of layer, and as few heads as keep the groups."""
    small = copy.deepcopy(config)
    layers = int(config.num_hidden_layers)
    kinds = list(getattr(config, "layer_types", None) or ())
    kept = min(layers, max([MAX_LAYERS, *(kinds.index(kind) + 1 for kind in set(kinds))]))
    for name, value in vars(small).items():
        if isinstance(value, list) and len(value) == layers:  # one item per layer
            setattr(small, name, value[:kept])
    small.num_hidden_layers = kept
    heads = int(getattr(config, "num_attention_heads", 0) or 0)
    if heads:
        _shrink_heads(small, heads)
    for name in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_dim"):
        if getattr(small, name, None):
            setattr(small, name, min(getattr(small, name), MAX_WIDTH))
    small.vocab_size = min(int(small.vocab_size), MAX_VOCABULARY)
    small.pad_token_id = small.bos_token_id = small.eos_token_id = None
    return small


def _shrink_heads(small: Any, heads: int) -> None:
    key_heads = int(getattr(small, "num_key_value_heads", None) or heads)
    group = heads // key_heads
    kept = group * max(1, min(key_heads, MAX_HEADS // group))
    width = int(small.hidden_size) // heads * kept
    if hasattr(small, "head_dim") and small.head_dim is None:
        small.head_dim = int(small.hidden_size) // heads
    small.num_attention_heads, small.hidden_size = kept, width
    if hasattr(small, "num_key_value_heads"):
        small.num_key_value_heads = kept // group
    if hasattr(small, "word_embed_proj_dim"):  # OPT
        small.word_embed_proj_dim = width
