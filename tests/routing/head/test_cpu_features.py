"""The router's own pass gives the states of the learner's, for every model that it runs."""

from __future__ import annotations

from typing import Any

import architectures as made
import pytest
import torch
from engine_cases import tiny

from toolwise.routing.head import cpu_features
from toolwise.routing.head.cpu_features import CpuFeatures, cpu_features_problem, last_states
from toolwise.routing.head.head import HeadSettings, RouterHead
from toolwise.routing.head.predictor import HeadPredictor, feature_width, prompt_features

START = [7, 60, 3, 3, 41, 9, 12, 30, 5, 88, 13]
PROMPTS = [
    [*START, 20, 21, 22],
    [*START, 20, 21, 50, 51, 52, 53, 54, 55],
    [*START, 20, 21],  # the beginning of another
    [90, 4],
    [*START, 70],
    [*START, 20, 21, 22],  # the same again
    [1],
]
FAST = [name for name, each in made.ARCHITECTURES.items() if each.engine == made.FAST]


@torch.no_grad()
@pytest.mark.parametrize("max_tokens", [1000, 20])
@pytest.mark.parametrize("name", FAST)
def test_states_are_those_of_the_learners_pass(name: str, max_tokens: int) -> None:
    model = made.build(name)
    assert cpu_features_problem(model, 30) is None
    expected = prompt_features(model, PROMPTS)
    torch.testing.assert_close(last_states(model, PROMPTS, max_tokens=max_tokens), expected, atol=2e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(
    "prompts", [[[1], [1]], [[1]] * 5, [[2, 3], [1], [1]], [[1], [1], [1, 2], [2], [2]], [[1, 2]] * 3]
)
def test_equal_prompts_of_a_token_or_two(prompts: list[list[int]]) -> None:
    model = tiny("builtin")
    expected = prompt_features(model, prompts)
    torch.testing.assert_close(last_states(model, prompts, max_tokens=1000), expected, atol=2e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_both_kinds_of_products_give_them(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_features, "MIN_ONEDNN_TOKENS", limit)
    model = tiny("builtin")
    expected = prompt_features(model, PROMPTS)
    torch.testing.assert_close(last_states(model, PROMPTS, max_tokens=1000), expected, atol=2e-5, rtol=1e-4)


def test_the_same_prompts_give_the_same_bits_again() -> None:
    model = tiny("builtin")
    first, second = (last_states(model, PROMPTS, max_tokens=1000) for _ in range(2))
    assert torch.equal(first, second)


def test_changed_weights_are_used_at_once() -> None:
    model = tiny()
    features = CpuFeatures(model)
    plan = features.plan(PROMPTS, max_tokens=1000)
    before = features.read(plan)
    with torch.no_grad():
        model.get_decoder().layers[0].mlp.down_proj.weight.mul_(1.5)
    after = features.read(plan)
    assert torch.equal(after, last_states(model, PROMPTS, max_tokens=1000))
    assert not torch.allclose(before, after, atol=1e-3)
    with torch.no_grad():
        torch.testing.assert_close(after, prompt_features(model, PROMPTS), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("settings", [{}, {"pool": "mean"}, {"layers": (-1, 0)}])
def test_a_predictor_uses_it_for_the_last_state_only(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, used, read = tiny(), [], cpu_features._read
    monkeypatch.setattr(
        "toolwise.routing.head.cpu_features._read",
        lambda *args: used.append(1) or read(*args),
    )
    width = feature_width(model, settings.get("layers", (-1,)))
    predictor = HeadPredictor(model, RouterHead(HeadSettings(width=width, routes=("A", "B"), **settings)))
    assert len(predictor.predict(PROMPTS)) == len(PROMPTS)
    assert used == ([] if settings else [1])


def test_half_precision_is_left_to_the_learners_pass() -> None:
    assert cpu_features_problem(tiny().to(torch.bfloat16), 10) is not None
