"""Prompt features do not depend on the rest of the batch and need one forward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from learner_cases import tiny_model

from toolwise.routing.head import features
from toolwise.routing.head.features import feature_width, prompt_features

PROMPTS = [[3, 4, 5, 6], [3, 4, 9], [7], [3, 4, 5, 6, 8, 9, 10]]


def by_hand(model: Any, prompt: list[int], pool: str, layers: tuple[int, ...]) -> torch.Tensor:
    out = model(torch.tensor([prompt]), output_hidden_states=True)
    # hidden_states[0] are the embeddings; the last one is after the trunk's norm.
    states = [out.hidden_states[-1 if layer == -1 else layer + 1][0] for layer in layers]
    return torch.cat([s[-1] if pool == "last" else s.mean(0) for s in states])


@pytest.mark.parametrize("pool", ["last", "mean"])
@pytest.mark.parametrize("layers", [(-1,), (0, -1)])
def test_features_are_the_models_own_states(pool: Any, layers: tuple[int, ...]) -> None:
    model = tiny_model()
    with torch.no_grad():
        found = prompt_features(model, PROMPTS, pool=pool, layers=layers)
        expected = torch.stack([by_hand(model, prompt, pool, layers) for prompt in PROMPTS])
    assert found.shape == (4, feature_width(model, layers))
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("pool", ["last", "mean"])
def test_micro_batches_change_nothing(pool: Any) -> None:
    model = tiny_model()
    with torch.no_grad():
        whole, cut = (prompt_features(model, PROMPTS, pool=pool, max_tokens=tokens) for tokens in (1000, 4))
    torch.testing.assert_close(whole, cut, atol=2e-6, rtol=1e-5)


def test_shared_prefixes_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, computed = tiny_model(), []
    real = features.hidden_states

    def counting(model: Any, packed: Any) -> Any:
        computed.append(packed.T)
        return real(model, packed)

    monkeypatch.setattr(features, "hidden_states", counting)
    prompt_features(model, PROMPTS)
    assert computed == [4 + 1 + 1 + 3]  # 3 4 5 6 · 9 · 7 · 8 9 10


def test_features_are_fp32_under_a_trunk_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    real = features.hidden_states  # rounded afterwards: many CPUs cannot multiply bf16
    monkeypatch.setattr(features, "hidden_states", lambda model, packed: real(model, packed).bfloat16())
    assert prompt_features(tiny_model(), PROMPTS, pool="mean").dtype == torch.float32


def test_no_prompts_have_no_features() -> None:
    assert prompt_features(tiny_model(), []).shape == (0, 32)
