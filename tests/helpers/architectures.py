"""Tiny random models of published architectures, and how Toolwise runs each of them.

`ARCHITECTURES` is one table: the class of a model, what is special about its configuration, and the engine that its
shape takes. Windows are shorter than the texts of the tests, head counts are odd or shared, heads are tied or
not, so that a formula that is left out shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

VOCABULARY = 97
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
SLIDING = ["sliding_attention", "full_attention"]
ROPE = {"rope_theta": 10000.0}
LLAMA3 = ROPE | {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONG = ROPE | {
    "rope_type": "longrope", "short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 64, "factor": 2.0,
}  # fmt: skip
FAST, GENERAL, TRANSFORMERS = "toolwise-fast", "toolwise-general", "transformers"


@dataclass(frozen=True)
class Architecture:
    model: str
    """Prefix of the classes in transformers: `Llama` for `LlamaConfig` and `LlamaForCausalLM`."""
    engine: str
    """The engine that it takes on a CPU in fp32 and on a GPU."""
    published: str
    """Models of this shape."""
    options: dict[str, Any] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=lambda: SHAPE)
    packed: bool = True
    """Whether the learner packs its rows."""
    trains: bool = True
    """Whether the learner supports it at all."""


GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 128,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MLA = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "num_key_value_heads": 6, "head_dim": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 16, "n_shared_experts": 1,
}  # fmt: skip

PARTIAL = ROPE | {"rope_type": "default", "partial_rotary_factor": 0.5}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("Llama", FAST, "Llama 2 and 3, SmolLM2, TinyLlama"),
    "llama, tied": Architecture("Llama", FAST, "Llama 3.2 1B and 3B", {"tie_word_embeddings": True}),
    "llama, biases": Architecture(
        "Llama", FAST, "", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 6}
    ),
    "llama, one key head": Architecture(
        "Llama", FAST, "", {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 1}
    ),
    "llama, llama3 rope": Architecture("Llama", FAST, "Llama 3.1", {"rope_parameters": LLAMA3}),
    "llama, yarn": Architecture("Llama", FAST, "long-context variants of Llama", {"rope_parameters": YARN}),
    "qwen2": Architecture("Qwen2", FAST, "Qwen 2 and 2.5", {"tie_word_embeddings": True}),
    "qwen2, sliding": Architecture(
        "Qwen2", FAST, "", {"use_sliding_window": True, "sliding_window": 5, "layer_types": SLIDING}
    ),
    "qwen3": Architecture("Qwen3", FAST, "Qwen 3"),
    "mistral": Architecture("Mistral", FAST, "Mistral 7B v0.2 and later", {"sliding_window": None}),
    "mistral, sliding": Architecture("Mistral", FAST, "Mistral 7B v0.1", {"sliding_window": 6}),
    "ministral3": Architecture(
        "Ministral3",
        GENERAL,
        "Ministral 3",
        {
            "rope_parameters": YARN | {"llama_4_scaling_beta": 0.9, "mscale": 1.0, "mscale_all_dim": 1.0},
            "sliding_window": None,
        },
    ),
    "smollm3": Architecture("SmolLM3", FAST, "SmolLM3", {"no_rope_layers": [1, 0]}),
    "gemma": Architecture("Gemma", FAST, "Gemma"),
    "gemma2": Architecture(
        "Gemma2",
        FAST,
        "Gemma 2",
        {
            "sliding_window": 5,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 6,
        },
    ),
    "gemma3": Architecture(
        "Gemma3", FAST, "Gemma 3 (text)", {"sliding_window": 5, "layer_types": SLIDING, "query_pre_attn_scalar": 6}
    ),
    "phi3": Architecture("Phi3", FAST, "Phi-3-mini-4k", {"sliding_window": 7}),
    "phi3, partial": Architecture(
        "Phi3",
        FAST,
        "Phi-4-mini",
        {"sliding_window": None, "rope_parameters": PARTIAL},
    ),
    "phi3, longrope": Architecture(
        "Phi3",
        FAST,
        "Phi-3-mini-128k",
        {"sliding_window": None, "rope_parameters": LONG, "original_max_position_embeddings": 64},
    ),
    "granite": Architecture(
        "Granite",
        FAST,
        "Granite 3",
        {"logits_scaling": 4.0, "attention_multiplier": 0.3, "residual_multiplier": 0.4, "embedding_multiplier": 3.0},
    ),
    "olmo2": Architecture("Olmo2", FAST, "OLMo 2"),
    "phi": Architecture("Phi", GENERAL, "Phi-1.5, Phi-2", {"partial_rotary_factor": 0.5}),
    "glm4": Architecture("Glm4", GENERAL, "GLM-4-0414"),
    "glm4, moe": Architecture(
        "Glm4Moe",
        GENERAL,
        "GLM-4.5",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "cohere": Architecture("Cohere", GENERAL, "Command R", {"logit_scale": 0.25}),
    "cohere2": Architecture("Cohere2", GENERAL, "Command R7B", {"sliding_window": 5, "layer_types": SLIDING}),
    "stablelm": Architecture("StableLm", TRANSFORMERS, "StableLM 2", {"use_qkv_bias": True}, packed=False),
    "gpt-neox": Architecture("GPTNeoX", GENERAL, "Pythia"),
    "gpt2": Architecture("GPT2", GENERAL, "GPT-2", shape=GPT2),
    "opt": Architecture("OPT", GENERAL, "OPT", {"ffn_dim": 40, "word_embed_proj_dim": 48}),
    "mixtral": Architecture("Mixtral", GENERAL, "Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3, moe": Architecture("Qwen3Moe", GENERAL, "Qwen3-30B-A3B", MOE),
    "gpt-oss": Architecture(
        "GptOss",
        GENERAL,
        "gpt-oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5, "layer_types": SLIDING},
    ),
    "deepseek-v3": Architecture("DeepseekV3", GENERAL, "DeepSeek V3, Kimi K2", MLA),
    "bloom": Architecture("Bloom", TRANSFORMERS, "BLOOM", {"n_head": 6, "n_layer": 2}, packed=False),
    "mamba": Architecture("Mamba", TRANSFORMERS, "Mamba", {"state_size": 4}, packed=False),
    "llama4": Architecture(
        "Llama4Text",
        TRANSFORMERS,
        "Llama 4",
        {"attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 40},
        packed=False,
        trains=False,
    ),
}


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **more: Any) -> Any:
    """A random model whose weights are large enough for its outputs to depend on every token."""
    architecture = ARCHITECTURES[name]
    torch.manual_seed(seed)
    prefix = architecture.model
    config = getattr(transformers, f"{prefix}TextConfig" if prefix == "Gemma3" else f"{prefix}Config")(
        **architecture.shape | architecture.options | more
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation="eager")
    if getattr(config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # as `load_model` does
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model.eval()
