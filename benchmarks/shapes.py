"""Shapes of the random models that the benchmarks run, as arguments of `LlamaConfig`."""

from __future__ import annotations

from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "0.1m": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 128, "vocab_size": 512, "tie_word_embeddings": True,
    },
    "0.9m": {
        "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 288, "vocab_size": 2048, "tie_word_embeddings": True,
    },
    "135m": {
        "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True,
    },
    "1.6b": {
        "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 32,
        "intermediate_size": 8192, "vocab_size": 49152, "tie_word_embeddings": True,
    },
    "3b": {
        "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8,
        "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
    },
}  # fmt: skip
GROUPED_1_6B = SHAPES["1.6b"] | {"num_key_value_heads": 8}
"""The 1.6b model with grouped-query attention, where generation is measured."""
