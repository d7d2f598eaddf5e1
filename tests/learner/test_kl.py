"""KL to a reference: which estimator fits where, by its expected gradient; a coefficient that holds a target."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learner_cases import LR, changed, sample, tiny_model
from torch import Tensor

from toolwise.config.loader import build_config
from toolwise.config.schema import RunConfig
from toolwise.errors import ConfigError
from toolwise.learner.actor import Actor
from toolwise.learner.kl import KlCoefficient, k2, k3, kl_loss

LOGITS = torch.tensor([0.4, -0.7, 1.1], dtype=torch.float64)
REFERENCE = torch.log_softmax(torch.tensor([-0.5, 0.9, 0.2], dtype=torch.float64), -1)


def true_gradient(forwards: bool = True) -> Tensor:
    """Of KL(π ‖ π_ref) over the logits of a softmax over three tokens, or of KL(π_ref ‖ π)."""
    logits = LOGITS.clone().requires_grad_()
    logp = torch.log_softmax(logits, -1)
    terms = logp.exp() * (logp - REFERENCE) if forwards else REFERENCE.exp() * (REFERENCE - logp)
    terms.sum().backward()
    assert logits.grad is not None
    return logits.grad


def expected_gradient(loss: Callable[[Tensor, Tensor], Tensor], *, in_reward: bool = False) -> Tensor:
    """Exact: each token's gradient, weighted by its probability under π."""
    logits = LOGITS.clone().requires_grad_()
    logp = torch.log_softmax(logits, -1)
    drawn = logp.exp().detach()
    # In the reward the estimate is a number, and log π is what is differentiated.
    per_token = loss(logp, REFERENCE).detach() * logp if in_reward else loss(logp, REFERENCE)
    (drawn * per_token).sum().backward()
    assert logits.grad is not None
    return logits.grad


def test_k1_in_the_reward_has_the_right_gradient() -> None:
    torch.testing.assert_close(expected_gradient(torch.sub, in_reward=True), true_gradient())


def test_k2_as_a_loss_has_the_right_gradient() -> None:
    torch.testing.assert_close(expected_gradient(k2), true_gradient())


def test_k3_as_a_loss_has_the_gradient_of_the_other_divergence() -> None:
    torch.testing.assert_close(expected_gradient(k3), true_gradient(forwards=False))
    assert float((expected_gradient(k3) - true_gradient()).norm()) > 0.1


def test_k1_as_a_loss_has_no_gradient_at_all() -> None:
    torch.testing.assert_close(expected_gradient(torch.sub), torch.zeros(3, dtype=torch.float64), atol=1e-12, rtol=0)
    assert float(true_gradient().norm()) > 0.1


def test_k1_and_k3_measure_without_bias() -> None:
    logp = torch.log_softmax(LOGITS, -1)
    truth = float((logp.exp() * (logp - REFERENCE)).sum())
    for estimator in (torch.sub, k3):
        assert float((logp.exp() * estimator(logp, REFERENCE)).sum()) == pytest.approx(truth)
    assert float((logp.exp() * k2(logp, REFERENCE)).sum()) != pytest.approx(truth, rel=0.01)


@given(st.floats(-50, 0), st.floats(-50, 0))
def test_k2_and_k3_are_never_negative_and_zero_at_the_reference(now: float, reference: float) -> None:
    a, b = torch.tensor([now]), torch.tensor([reference])
    for estimator in (k2, k3):
        assert estimator(a, b).item() >= 0.0
        assert math.isfinite(estimator(a, b).item())
        assert estimator(a, a).item() == 0.0


def test_k1_as_a_loss_is_refused_with_a_way_out() -> None:
    with pytest.raises(ConfigError, match=r'zero.*use "k2", or put k1 in the reward') as caught:
        kl_loss("k1", torch.zeros(1), torch.zeros(1))
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="mean gradient of zero"):
        Actor(tiny_model(), changed(LR, {"algorithm": {"kl": "loss", "kl_estimator": "k1"}}))
    Actor(tiny_model(), changed(LR, {"algorithm": {"kl": "reward", "kl_estimator": "k1"}}))  # where it is correct


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`algorithm\.kl_estimator` must be 'k1', 'k2' or 'k3', got 'k9'"):
        build_config(RunConfig, {"algorithm": {"kl_estimator": "k9"}}, source="run.toml")


# The coefficient.


def test_the_coefficient_by_hand() -> None:
    kl = KlCoefficient(0.1, target=2.0, horizon=100)
    kl.adapt(2.2, rollouts=50)  # off by a tenth, half a horizon
    assert kl.value == pytest.approx(0.1 * 1.05)
    kl.adapt(20.0, rollouts=50)  # however far off, a fifth
    assert kl.value == pytest.approx(0.1 * 1.05 * 1.1)
    kl.adapt(0.0, rollouts=50)
    assert kl.value == pytest.approx(0.1 * 1.05 * 1.1 * 0.9)


def test_without_a_target_it_stays() -> None:
    kl = KlCoefficient(0.1)
    kl.adapt(99.0, rollouts=1000)
    assert kl.value == 0.1


def test_however_large_a_batch_it_stays_above_zero() -> None:
    kl = KlCoefficient(0.1, target=1.0, horizon=1)
    kl.adapt(0.0, rollouts=10_000)
    assert kl.value == 0.05


def bandit(coefficient: KlCoefficient, steps: int) -> list[float]:
    """A bandit policy with eight arms, one rewarded, constrained by a k2 loss; KL after each step."""
    generator = torch.Generator().manual_seed(0)
    reference = torch.log_softmax(torch.zeros(8), -1)
    logits = torch.zeros(8, requires_grad=True)
    found = []
    for _ in range(steps):
        logp = torch.log_softmax(logits, -1)
        arms = torch.multinomial(logp.exp().detach(), 64, replacement=True, generator=generator)
        drawn, ref = logp[arms], reference[arms]
        reward = (arms == 3).float()
        loss = -(drawn * (reward - reward.mean())).mean() + coefficient.value * k2(drawn, ref).mean()
        [gradient] = torch.autograd.grad(loss, logits)
        with torch.no_grad():
            logits -= 0.5 * gradient
        kl = float(k3(drawn.detach(), ref).mean())
        coefficient.adapt(kl, rollouts=64)
        found.append(kl)
    return found


def test_the_coefficient_holds_its_target() -> None:
    for target in (0.2, 0.6):
        for begin in (0.001, 3.0):
            tail = bandit(KlCoefficient(begin, target=target, horizon=200), 600)[-200:]
            assert sum(tail) / len(tail) == pytest.approx(target, rel=0.15)
    free = bandit(KlCoefficient(0.0), 600)[-1]
    assert free > 1.2  # without a penalty, it goes far beyond both


# In the actor.


def held(**algorithm: Any) -> tuple[float, Actor]:
    """KL to the initial policy after a few updates on its own samples."""
    model = tiny_model()
    actor = Actor(
        model, changed(LR, {"algorithm": {"kl_coef": 0.0} | algorithm}, lr=3e-3), needs=frozenset({"ref_logprobs"})
    )
    kl = 0.0
    for step in range(8):
        credited = sample(model, [1.0, -1.0, 0.5, -0.5], seed=step)
        annotated = actor.annotate([c.annotated.scored for c in credited])
        metrics = actor.update([replace(c, annotated=a) for c, a in zip(credited, annotated, strict=True)])
        kl = metrics["kl/reference"]
        if step == 0:
            assert kl == pytest.approx(0.0, abs=1e-6)
    return kl, actor


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_kl_loss_constrains_the_policy(estimator: str) -> None:
    free, _ = held()
    near, _ = held(kl="loss", kl_estimator=estimator, kl_coef=1.0)
    assert near < 0.5 * free


def test_the_coefficient_is_saved_and_restored() -> None:
    _, actor = held(kl="loss", kl_coef=0.1, kl_target=1e-6, kl_horizon=10)
    assert actor.kl.value > 0.1
    fresh = Actor(tiny_model(), changed(LR, {"algorithm": {"kl": "loss", "kl_coef": 0.1}}))
    fresh.load_state_dict(actor.state_dict())
    assert fresh.kl.value == actor.kl.value
