"""Copies of a model's modules that share its weights.

The engine, the learner, the reference and the router all run one model, each in its own way: with another attention,
with fused parts, without adapters. None of them modifies the model. Each changes a copy of the modules that holds the
same parameters, so that all of them see an update at once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

from torch.nn import Module


@cache
def register_attention(name: str, attend: Callable[..., Any]) -> str:
    """Register an attention function with transformers and return its name. transformers builds no mask for a name that
    its mask interface does not know, so no T x T mask is ever allocated."""
    from transformers import AttentionInterface

    AttentionInterface.register(name, attend)
    return name


def shared_copy(
    module: Any, *, attention: str | None = None, substitute: Callable[[Module], Module] = lambda part: part
) -> Any:
    """Copy the modules under `module`, but not their parameters, buffers and hooks.

    `attention` is the name of the copy's attention (`register_attention`). `substitute`
    returns the module to copy in place of each one, such as the layer beneath an adapter. Takes about 2 µs per module.
    """
    configs: dict[int, Any] = {}
    if attention is not None:
        config = configs[id(module.config)] = copy.deepcopy(module.config)
        config._attn_implementation = attention
    return _copy_modules(module, substitute, configs, {})


def _copy_modules(
    module: Module, substitute: Callable[[Module], Module], configs: dict[int, Any], copies: dict[int, Module]
) -> Module:
    module = substitute(module)
    if id(module) in copies:
        return copies[id(module)]
    copied = copies[id(module)] = object.__new__(type(module))
    state = dict(module.__dict__)
    if id(state.get("config")) in configs:
        state["config"] = configs[id(state["config"])]
    state["_modules"] = {
        name: None if part is None else _copy_modules(part, substitute, configs, copies)
        for name, part in module._modules.items()
    }
    copied.__dict__.update(state)
    return copied
