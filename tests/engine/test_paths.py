"""`engine_path` names the engine of a model, and what keeps it from a faster one."""

from __future__ import annotations

import torch
from architectures import build

from toolwise.engine import engine_path


def test_each_path_has_a_reason() -> None:
    assert engine_path(build("llama")) == ("toolwise-fast", "the lean forward computes its layers")
    assert engine_path(build("mixtral")) == ("toolwise-general", "MixtralSparseMoeBlock has no gate_proj")
    path, reason = engine_path(build("bloom"))
    assert path == "transformers"
    assert "attention interface" in reason


def test_half_precision_on_a_cpu_goes_the_general_way() -> None:
    path, reason = engine_path(build("llama", torch.bfloat16))
    assert path == "toolwise-general"
    assert "float32, not bfloat16" in reason
