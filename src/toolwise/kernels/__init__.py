"""Fused GPU kernels: paged attention, cache writes, norms, activations and sampling, one pass over memory each.

Each function writes only its result, and the KV cache where documented. On a GPU it is a Triton kernel that needs no
host synchronisation and can be captured in a CUDA graph; elsewhere it is plain torch (`torch_reference`), with the same
formula and the same order of rounding.
"""

from __future__ import annotations

from importlib import import_module, util
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from toolwise.kernels.torch_reference import (
        add_rms_norm,
        gated_silu_backward,
        gelu_tanh_mul,
        merge,
        paged_attention_decode,
        paged_attention_prefill,
        rms_norm,
        rms_norm_backward,
        rope_and_store,
        rotate,
        sample,
        shared_prefix_decode,
        silu_mul,
        silu_mul_backward,
        softmax_sums,
        softmax_sums_backward,
        store_kv,
    )

__all__ = [
    "MAX_HEAD_SIZE",
    "add_rms_norm",
    "available",
    "gated_silu_backward",
    "gelu_tanh_mul",
    "merge",
    "paged_attention_decode",
    "paged_attention_prefill",
    "rms_norm",
    "rms_norm_backward",
    "rope_and_store",
    "rotate",
    "sample",
    "shared_prefix_decode",
    "silu_mul",
    "silu_mul_backward",
    "softmax_sums",
    "softmax_sums_backward",
    "store_kv",
]

MAX_HEAD_SIZE = 256
"""The largest heads whose tiles fit into a GPU's shared memory."""

_MODULES = {
    "add_rms_norm": "pointwise",
    "begin_step": "decode_step",
    "end_step": "decode_step",
    "gated_silu_backward": "backward",
    "gelu_tanh_mul": "pointwise",
    "linear_add": "decode_linear",
    "merge": "heads",
    "norm_linear": "decode_linear",
    "paged_attention_decode": "decode_attention",
    "paged_attention_prefill": "prefill_attention",
    "rms_norm": "pointwise",
    "rms_norm_backward": "backward",
    "rope_and_store": "cache_write",
    "rotate": "heads",
    "sample": "sampling",
    "shared_prefix_decode": "prefix_attention",
    "silu_mul": "pointwise",
    "silu_mul_backward": "pointwise",
    "softmax_sums": "softmax",
    "softmax_sums_backward": "softmax",
    "store_kv": "cache_write",
}

_REFERENCES = dict.fromkeys(("begin_step", "end_step", "linear_add", "norm_linear"), "decode_reference")


def available(device: torch.device | str) -> bool:
    """Whether the Triton kernels can run on `device`."""
    return torch.device(device).type == "cuda" and util.find_spec("triton") is not None


def kernel(name: str, device: torch.device | str) -> Any:
    """The implementation of `name` for `device`; look it up once if you call it often."""
    module = _MODULES[name] if available(device) else _REFERENCES.get(name, "torch_reference")
    return getattr(import_module(f"toolwise.kernels.{module}"), name)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def dispatch(first: torch.Tensor, *args: Any, **options: Any) -> Any:
        return kernel(name, first.device)(first, *args, **options)

    dispatch.__name__ = name
    globals()[name] = dispatch
    return dispatch
