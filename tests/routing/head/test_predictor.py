"""The mean of heads and of λ is exact, and resumes from its state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from learner_cases import tiny_model

from toolwise.routing.head import predictor
from toolwise.routing.head.head import HeadSettings, RouterHead
from toolwise.routing.head.predictor import HeadAverage, feature_width, prompt_features


def head(seed: int) -> RouterHead:
    made = RouterHead(HeadSettings(width=4, routes=("ANSWER", "SEARCH-FAMILY", "CALCULATE-FAMILY"), hidden=5))
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in made.parameters():
            weight.normal_()
    return made


def test_it_is_the_mean_of_what_was_added() -> None:
    heads, average = [head(seed) for seed in range(5)], HeadAverage()
    for place, each in enumerate(heads):
        average.add(each, [float(place), 1.0])
    assert average.head is not None
    for name, mean in average.head.named_parameters():
        assert torch.allclose(mean, torch.stack([dict(h.named_parameters())[name] for h in heads]).mean(0), atol=1e-6)
    assert average.multipliers == [2.0, 1.0]


def test_until_something_is_added_it_is_what_is_given() -> None:
    average, own = HeadAverage(), head(0)
    assert average.of(own, [0.3]) == (own, [0.3])
    average.add(head(1), [0.5])
    assert average.of(own, [0.3])[1] == [0.5]
    average.reset()
    assert average.of(own, [0.3]) == (own, [0.3])


def test_added_heads_are_copied() -> None:
    average, own = HeadAverage(), head(0)
    kept = own.out.weight.detach().clone()
    average.add(own, [])
    with torch.no_grad():
        own.out.weight.add_(1.0)
    assert average.head is not None
    assert torch.equal(average.head.out.weight, kept)


def test_it_resumes_from_its_state() -> None:
    average, other = HeadAverage(), HeadAverage()
    other.load_state_dict({}, head(9))
    assert other.head is None
    for seed in range(2):
        average.add(head(seed), [0.5])
    other.load_state_dict(average.state_dict(), head(9))
    for each in (average, other):
        each.add(head(2), [0.2])
    assert average.head is not None
    assert other.head is not None
    assert all(torch.equal(a, b) for a, b in zip(average.head.parameters(), other.head.parameters(), strict=True))
    assert average.multipliers == other.multipliers


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
    real = predictor.hidden_states

    def counting(model: Any, packed: Any) -> Any:
        computed.append(packed.T)
        return real(model, packed)

    monkeypatch.setattr(predictor, "hidden_states", counting)
    prompt_features(model, PROMPTS)
    assert computed == [4 + 1 + 1 + 3]  # 3 4 5 6 · 9 · 7 · 8 9 10


def test_features_are_fp32_under_a_trunk_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    real = predictor.hidden_states  # rounded afterwards: many CPUs cannot multiply bf16
    monkeypatch.setattr(predictor, "hidden_states", lambda model, packed: real(model, packed).bfloat16())
    assert prompt_features(tiny_model(), PROMPTS, pool="mean").dtype == torch.float32


def test_no_prompts_have_no_features() -> None:
    assert prompt_features(tiny_model(), []).shape == (0, 32)
