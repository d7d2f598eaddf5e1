"""The GPU memory of training, part by part, from the shapes of the weights and the settings. In bytes, with N trained
parameters, T tokens in a micro-batch, L layers of width d with H query heads and K key heads of size s and an MLP of
width F, V tokens in the vocabulary, and w bytes in a weight:

    weights            w for every parameter
    master weights     4 N                  if w < 4 and the state is not on the CPU
    moments            8 N, 4 N in bf16     0 on the CPU
    gradients          4 N                  the fp32 sums
    activations        T L (w (4 d + 2 H s + 2 K s + 3 F) + 4 H + 8)
                       inputs and outputs of both norms, queries, keys, values, the attention's output, gate, up and
                       their product; log-sum-exp and the norms' scales in fp32. With activation checkpointing only
                       the input of each layer (w d), and all of one layer
    hidden states      T w (3 d + 2 s)      the last norm's input and output, those that predict, the rotary angles
    backward           T w (3 F + 2 d)      gradients within one layer
    logits             2 w C V + 2 w d V    a chunk of C tokens and its gradient, and the head's gradient

The backward pass frees activations while it computes half-precision gradients (w N), so that the larger of the two
counts. A forward pass without gradients, and generation, need less than an update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from toolwise.config.schema import DEFAULT_PASS_TOKENS, ActorConfig
from toolwise.config.sft import SftConfig
from toolwise.learner.forward import CHUNK_BYTES, CHUNK_TOKENS
from toolwise.learner.optimizer import Optimizer
from toolwise.learner.sharding import compute_device

MAX_DEFAULT_SHARE = 0.4
"""Share of a GPU's memory that an update may be estimated to take where its micro-batches are larger than usual."""
CONTEXT_BYTES = 1_200_000_000
"""CUDA context, compiled kernels, captured graphs and library workspaces: not in `torch.cuda.max_memory_allocated`."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that activations depend on."""

    layers: int
    width: int
    query_width: int
    """Query heads times their size."""
    key_width: int
    heads: int
    head_size: int
    mlp_width: int
    vocabulary: int
    item_bytes: int

    @classmethod
    def of(cls, model: Any) -> ModelShape:
        """Of a model on any device, also on "meta"."""
        config, embeddings = model.get_decoder().config, model.get_input_embeddings().weight
        width = int(getattr(config, "hidden_size", 0) or embeddings.shape[1])
        heads = int(config.num_attention_heads)
        head_size = int(getattr(config, "head_dim", 0) or width // heads)
        mlp_width = getattr(config, "intermediate_size", 0) or 4 * width
        return cls(
            layers=int(config.num_hidden_layers),
            width=width,
            query_width=heads * head_size,
            key_width=int(getattr(config, "num_key_value_heads", 0) or heads) * head_size,
            heads=heads,
            head_size=head_size,
            mlp_width=int(max(mlp_width) if isinstance(mlp_width, list | tuple) else mlp_width),
            vocabulary=int(config.vocab_size),
            item_bytes=int(embeddings.element_size()),
        )

    def layer_bytes(self) -> int:
        """Activations that one layer keeps for one token."""
        values = 4 * self.width + 2 * self.query_width + 2 * self.key_width + 3 * self.mlp_width
        return self.item_bytes * values + 4 * self.heads + 8

    def activation_bytes(self, tokens: int, *, checkpointing: bool) -> int:
        """Of a micro-batch: what is kept for the backward pass, and the most that it adds in one layer."""
        kept = self.layers * self.layer_bytes()
        if checkpointing:
            kept = self.layers * self.item_bytes * self.width + self.layer_bytes()
        ends = self.item_bytes * (3 * self.width + 2 * self.head_size)
        backward = self.item_bytes * (3 * self.mlp_width + 2 * self.width)
        return tokens * (kept + ends + backward)

    def logit_bytes(self, tokens: int, chunk_tokens: int | None) -> int:
        chunk = chunk_tokens or max(CHUNK_TOKENS, CHUNK_BYTES // (self.vocabulary * self.item_bytes))
        return 2 * self.item_bytes * self.vocabulary * (min(chunk, tokens) + self.width)


@dataclass(frozen=True, slots=True)
class UpdateMemory:
    """GPU memory during an update."""

    permanent: dict[str, int]
    """What lives as long as the run."""
    gradients: int
    activations: int
    logits: int
    half_gradients: int
    """Gradients of one micro-batch in half precision, before they are added to the sums."""

    @property
    def peak(self) -> int:
        """The most that the learner has allocated at a time, without the engine's cache."""
        return sum(self.permanent.values()) + self.gradients + max(self.activations + self.logits, self.half_gradients)

    def parts(self) -> dict[str, int]:
        """What `peak` consists of."""
        rest = max(0, self.half_gradients - self.activations - self.logits)
        parts = {
            **self.permanent,
            "gradients": self.gradients + rest,
            "activations": self.activations,
            "logits": self.logits,
        }
        return {name: size for name, size in parts.items() if size}


def default_pass_tokens(model: Any, optimizer: Optimizer, config: ActorConfig | SftConfig) -> int:
    """Tokens of a micro-batch if the settings name none. A GPU computes a small model faster than the CPU launches its
    kernels, so passes should be large where memory allows it."""
    device = compute_device(model)
    if device.type == "cuda":
        available = MAX_DEFAULT_SHARE * torch.cuda.get_device_properties(device).total_memory
        for tokens in (4 * DEFAULT_PASS_TOKENS, 2 * DEFAULT_PASS_TOKENS):
            if update_memory(model, optimizer, config, tokens).peak < available:
                return tokens
    return DEFAULT_PASS_TOKENS


def update_memory(
    model: Any, optimizer: Optimizer, actor: ActorConfig | SftConfig, tokens: int | None = None
) -> UpdateMemory:
    """The memory of an update with micro-batches of `tokens`, by default those of the settings."""
    shape = ModelShape.of(model)
    tokens = tokens or actor.micro_batch_tokens or default_pass_tokens(model, optimizer, actor)
    trained = sum(weight.numel() for weight in optimizer.weights)
    half = sum(weight.nbytes for weight in optimizer.weights if weight.element_size() < 4)
    return UpdateMemory(
        permanent=permanent_parts(model, optimizer),
        gradients=4 * trained,
        activations=shape.activation_bytes(tokens, checkpointing=actor.activation_checkpointing),
        logits=shape.logit_bytes(tokens, actor.logit_chunk_tokens),
        half_gradients=half,
    )


def permanent_parts(model: Any, optimizer: Optimizer) -> dict[str, int]:
    """Weights, master weights and moments on the model's device. Each adapted layer (LoRA) also has a merged weight."""
    trained = sum(weight.numel() for weight in optimizer.weights)
    copies = sum(m.nbytes for w, m in zip(optimizer.weights, optimizer.masters, strict=True) if w is not m)
    parts = {
        "weights": sum(parameter.nbytes for parameter in model.parameters()),
        "merged weights": sum(layer.base_layer.weight.nbytes for layer in model.modules() if _is_adapter(layer)),
        "fp32 master weights": 0 if optimizer.offloaded else copies,
        "optimizer states": 0 if optimizer.offloaded else 2 * optimizer.moment_bytes * trained,
    }
    return {name: size for name, size in parts.items() if size}


def _is_adapter(module: Any) -> bool:
    return hasattr(module, "base_layer") and hasattr(type(module), "get_delta_weight")


def snapshot_bytes(model: Any, optimizer: Optimizer) -> int:
    """CPU memory of the copy from which a checkpoint is written: weights, half-precision masters and moments."""
    trained = sum(weight.numel() for weight in optimizer.weights)
    masters = sum(4 * weight.numel() for weight in optimizer.weights if weight.element_size() < 4)
    weights: int = sum(parameter.nbytes for parameter in model.parameters())
    return weights + masters + 2 * optimizer.moment_bytes * trained
