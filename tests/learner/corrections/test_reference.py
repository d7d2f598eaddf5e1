"""Decoupled PPO, recomputed and interpolated, against the objectives of the papers: written down once more with
probabilities instead of log-probs and with the cases of the clip spelled out, differentiated in float64.

    Hilton et al. 2022, AReaL   J = E[(π_prox / π_behav) · min(r·A, clip(r, 1 − ε_low, 1 + ε_high)·A)], r = π_θ / π_prox
    A-3PO (arXiv 2512.06547)    π_prox = π_behav^(1/d) · π_θ^(1 − 1/d),  d versions apart; π_behav for d = 0
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from toolwise.config.schema import ActorConfig
from toolwise.learner.correction import Correction, SampledWith
from toolwise.learner.corrections import build_loss

LOW, HIGH, DUAL, COUNT, LEARNER = 0.2, 0.28, 3.0, 400, 7


def objective(now: Tensor, prox: Tensor, behaviour: Tensor, advantages: Tensor, cap: float | None) -> list[Tensor]:
    """J of each token, from probabilities; `prox` has no gradient."""
    terms = []
    for p, q, mu, a in zip(now, prox.tolist(), behaviour.tolist(), advantages.tolist(), strict=True):
        r = p / q
        if a > 0:
            surrogate = r * a if r.item() < 1 + HIGH else torch.tensor((1 + HIGH) * a, dtype=torch.float64)
        elif r.item() < 1 - LOW:
            surrogate = torch.tensor((1 - LOW) * a, dtype=torch.float64)
        else:  # the dual clip bounds what a bad token can cost
            surrogate = r * a if r.item() < DUAL else torch.tensor(DUAL * a, dtype=torch.float64)
        weight = q / mu
        terms.append(surrogate * (0.0 if cap is not None and weight > cap else weight))
    return terms


def interpolated(now: float, behaviour: float, version: int) -> float:
    """Of a token that `version` sampled, or an unknown one (−1): the learner makes version 8 out of 7."""
    behind = 0 if version < 0 else LEARNER + 1 - version
    exponent = 1.0 if behind == 0 else 1.0 / behind
    return float(behaviour**exponent * now ** (1.0 - exponent))


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("name", ["decoupled", "interpolated"])
@pytest.mark.parametrize("seed", range(3))
def test_losses_and_gradients_are_those_of_the_paper(name: str, cap: float | None, seed: int) -> None:
    rng = np.random.default_rng(seed)
    behaviour = rng.uniform(0.02, 0.9, COUNT)
    old = np.clip(behaviour * np.exp(0.5 * rng.normal(size=COUNT)), 0.01, 0.99)
    current = np.clip(old * np.exp(0.6 * rng.normal(size=COUNT)), 0.005, 0.995)
    versions = rng.integers(-1, LEARNER + 1, COUNT)
    advantages = torch.from_numpy(rng.normal(size=COUNT))
    if name == "interpolated":
        prox = np.array([interpolated(p, mu, int(v)) for p, mu, v in zip(current, behaviour, versions, strict=True)])
    else:
        prox = old
    p = torch.from_numpy(current).requires_grad_()
    terms = objective(p, torch.from_numpy(prox), torch.from_numpy(behaviour), advantages, cap)
    [slopes] = torch.autograd.grad(torch.stack(terms).sum(), p)

    actor = ActorConfig.model_validate(
        {
            "clip_ratio_low": LOW,
            "clip_ratio_high": HIGH,
            "dual_clip": DUAL,
            "correction": {"decoupled_cap": cap or 0.0},
        }
    )
    loss = build_loss(actor, name)
    assert isinstance(loss, Correction)
    logprobs = torch.from_numpy(np.log(current)).requires_grad_()
    sampled = SampledWith(torch.from_numpy(np.log(behaviour)), torch.from_numpy(versions), LEARNER)
    losses, metrics = loss.corrected(
        logprobs, torch.from_numpy(np.log(old)), advantages, torch.zeros(COUNT).long(), sampled
    )
    losses.sum().backward()
    torch.testing.assert_close(losses.detach(), -torch.stack(terms).detach(), rtol=1e-9, atol=1e-12)
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, -slopes * torch.from_numpy(current), rtol=1e-9, atol=1e-12)  # p·d/dp
    assert 0.05 < metrics["clip_frac"].mean() < 0.9
    assert (0.05 < metrics["masked_frac"].mean() < 0.9) == (cap is not None)


def test_the_exponent_of_the_paper_is_the_share_of_versions() -> None:
    """1 − 1/d = (v_prox − v_behav) / (v_θ − v_behav), as `interpolated_ppo.py` has it."""
    for version in range(LEARNER + 1):
        behind = LEARNER + 1 - version
        assert 1 - 1 / behind == pytest.approx((LEARNER - version) / behind)
