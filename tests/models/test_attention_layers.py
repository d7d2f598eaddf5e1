"""How a model's layers attend is found by running it, and what would give other numbers is refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import build
from engine_cases import tiny
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

from toolwise.engine import engine_path
from toolwise.models.attention_layers import attention_layers, head_problem
from toolwise.models.weight_sharing import shared_copy


def test_shapes_windows_and_scales_are_those_of_the_layers() -> None:
    first, second = attention_layers(build("gemma2")).layers
    assert (first.heads, first.key_heads, first.key_size, first.value_size) == (6, 3, 8, 8)
    assert first.scale == pytest.approx(6**-0.5)
    assert (first.window, first.softcap, first.sinks) == (5, 2.0, False)
    assert second.window is None
    assert not second.plain


def test_keys_and_values_may_differ_in_size_and_layers_may_have_sinks() -> None:
    assert {(layer.key_size, layer.value_size) for layer in attention_layers(build("deepseek-v3")).layers} == {(12, 6)}
    assert all(layer.sinks for layer in attention_layers(build("gpt-oss")).layers)


def test_a_window_as_long_as_the_context_is_none() -> None:
    assert attention_layers(build("mistral", sliding_window=128)).windows == (None, None)
    assert attention_layers(build("mistral", sliding_window=127)).windows == (127, 127)


def test_the_model_runs_only_the_first_time() -> None:
    model = tiny()
    report = attention_layers(model)
    assert attention_layers(shared_copy(model)) is report
    model.get_decoder().forward = None
    assert attention_layers(model) is report


def test_a_model_in_training_mode_is_found_the_same_and_stays_in_it() -> None:
    model = build("llama", attention_dropout=0.9).train()
    assert attention_layers(model).problem is None
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3, moe"])
def test_other_precisions_are_within_their_rounding(name: str, dtype: torch.dtype) -> None:
    assert attention_layers(build(name, dtype)).problem is None


def test_a_caller_s_autocast_changes_nothing() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert attention_layers(build("llama")).problem is None


def shifts_tokens(self: Any, hidden_states: torch.Tensor, *args: Any, **more: Any) -> Any:
    """Each token also reads the one before it, as in a convolution."""
    return super(type(self), self).forward(hidden_states + 0.1 * hidden_states.roll(1, 1), *args, **more)


def ignores_positions(self: Any, *args: Any, position_ids: Any = None, **more: Any) -> Any:
    return super(type(self), self).forward(*args, **more)


def patched(forward: Any, *, whole: bool) -> Any:
    model = tiny()
    module = model.get_decoder() if whole else model.get_decoder().layers[1].self_attn
    module.__class__ = type("Patched", (type(module),), {"forward": forward})
    return model


@pytest.mark.parametrize("model", [patched(shifts_tokens, whole=False), patched(ignores_positions, whole=True)])
def test_what_reads_other_tokens_or_counts_them_itself_is_refused(model: Any) -> None:
    report = attention_layers(model)
    assert report.problem is not None
    assert "its hidden states are others" in report.problem


def test_recurrent_layers_are_refused() -> None:
    shape = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
    config = Qwen3NextConfig(**shape, **heads, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8)
    assert "caches more than keys and values" in (attention_layers(Qwen3NextForCausalLM(config)).problem or "")


def test_what_is_no_decoder_is_refused() -> None:
    assert attention_layers(object()).problem == "it has no decoder (get_decoder)"
    broken = LlamaForCausalLM(LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=20))
    broken.model.layers[0].mlp.down_proj = torch.nn.Linear(3, 3)
    problem = attention_layers(broken).problem or ""
    assert problem.startswith("its forward pass fails with our attention (RuntimeError: ")
    assert "\n" not in problem


def test_logits_that_are_not_those_of_the_head_alone_are_found() -> None:
    assert all(head_problem(build(name)) is None for name in ("llama", "gemma2", "granite", "cohere", "gpt2", "bloom"))
    model = build("llama")
    model.__class__ = type("Scaled", (type(model),), {"forward": scales_logits})
    assert "relative error" in (head_problem(model) or "")
    assert engine_path(model)[0] == "transformers"
    assert head_problem(build("llama4")) == "get_decoder() is not the part below its head"


def scales_logits(self: Any, *args: Any, **more: Any) -> Any:
    out = super(type(self), self).forward(*args, **more)
    out.logits = out.logits * 0.5
    return out
