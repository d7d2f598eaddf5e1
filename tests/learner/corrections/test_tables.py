"""Each correction against a table worked by hand, and the properties that all of them share."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from toolwise.config.correction import CorrectionName
from toolwise.config.schema import ActorConfig
from toolwise.learner.correction import Correction, SampledWith
from toolwise.learner.corrections import build_loss
from toolwise.learner.losses import PpoClip

NAMES = get_args(CorrectionName)
log = math.log

# name, [(p_θ, p_old, p_μ, version, advantage, loss, d loss / d log π_θ)] of the tokens of one sequence, and the mean
# of what was masked or truncated. Clip 0.2 on both sides, dual clip 3, learner at version 5.
TABLES = [
    ("none", [(0.5, 0.5, 0.25, 4, 2.0, -2.0, -2.0), (0.5, 0.25, 0.25, 4, 2.0, -2.4, 0.0)], None),
    # w = 2 (0.5 / 0.25); the second would be 4 and is truncated at 2
    ("tis", [(0.5, 0.5, 0.25, 4, 1.0, -2.0, -2.0), (0.4, 0.4, 0.1, 4, -1.0, 2.0, 2.0)], ("truncated_frac", 1.0)),
    # the same weights, not truncated; the third: θ/prox = 1.5 is clipped at 1.2, times 2
    (
        "decoupled",
        [
            (0.5, 0.5, 0.25, 4, 1.0, -2.0, -2.0),
            (0.4, 0.4, 0.1, 4, -1.0, 4.0, 4.0),
            (0.6, 0.4, 0.2, 4, 1.0, -2.4, 0.0),
        ],
        ("masked_frac", 0.0),
    ),
    # one version behind, α = 1/2: prox = √(0.4·0.1) = 0.2, weight 2, ratio 2 clipped at 1.2; a fresh one: α = 0, weight
    # 1 and ratio 1.1; two behind, α = 2/3: prox = 0.8^(2/3)·0.1^(1/3) = 0.4, weight 4, ratio 2
    (
        "interpolated",
        [
            (0.4, 0.9, 0.1, 4, 1.0, -2.4, 0.0),
            (0.22, 0.9, 0.2, 5, 1.0, -1.1, -1.1),
            (0.8, 0.9, 0.1, 3, -1.0, 8.0, 8.0),
        ],
        ("masked_frac", 0.0),
    ),
    # ratios 2 (kept), 6 and 0.4 (masked)
    (
        "icepop",
        [
            (0.5, 0.5, 0.25, 4, 1.0, -2.0, -2.0),
            (0.6, 0.6, 0.1, 4, 1.0, 0.0, 0.0),
            (0.2, 0.2, 0.5, 4, -1.0, 0.0, 0.0),
        ],
        ("masked_frac", 2 / 3),
    ),
    # geometric mean √(2·0.5) = 1: kept, without weights
    (
        "sequence_mask",
        [(0.5, 0.5, 0.25, 4, 1.0, -1.0, -1.0), (0.2, 0.2, 0.4, 4, 1.0, -1.0, -1.0)],
        ("masked_frac", 0.0),
    ),
    # √(2·0.6) = 1.095: masked
    ("sequence_mask", [(0.5, 0.5, 0.25, 4, 1.0, 0.0, 0.0), (0.3, 0.3, 0.5, 4, 1.0, 0.0, 0.0)], ("masked_frac", 1.0)),
    # p moved by 0.25: too far in the direction of A > 0, not too far against A < 0; a ratio of 10 alone is no reason
    (
        "dppo",
        [
            (0.5, 0.9, 0.25, 4, 1.0, 0.0, 0.0),
            (0.5, 0.9, 0.25, 4, -1.0, 2.0, 2.0),
            (0.1, 0.9, 0.01, 4, 1.0, -10.0, -10.0),
            (0.25, 0.9, 0.5, 4, -1.0, 0.0, 0.0),
        ],
        ("masked_frac", 0.5),
    ),
    # weights 2 and 3 (10 is clipped at 1 + 2): every token has a gradient
    (
        "cispo",
        [(0.5, 0.9, 0.25, 4, 1.0, -2 * log(0.5), -2.0), (0.5, 0.9, 0.05, 4, -2.0, 6 * log(0.5), 6.0)],
        ("clip_frac", 0.5),
    ),
    # s = √(2·0.5) = 1: both tokens have the ratio 1
    ("gspo", [(0.5, 0.9, 0.25, 4, 1.0, -1.0, -1.0), (0.2, 0.9, 0.4, 4, -1.0, 1.0, 1.0)], ("clip_frac", 0.0)),
    # s = √(2·2) = 2: clipped where the advantage is positive
    ("gspo", [(0.5, 0.9, 0.25, 4, 1.0, -1.0004, 0.0), (0.4, 0.9, 0.2, 4, -1.0, 2.0, 2.0)], ("clip_frac", 0.5)),
]


def built(name: str) -> Correction:
    loss = build_loss(ActorConfig(), name)
    assert isinstance(loss, Correction)
    return loss


@pytest.mark.parametrize(("name", "tokens", "share"), TABLES)
def test_hand_worked_table(
    name: str, tokens: list[tuple[float, float, float, int, float, float, float]], share: tuple[str, float] | None
) -> None:
    now, old, behaviour, version, advantages, expected, slopes = torch.tensor(tokens, dtype=torch.float64).T
    logprobs = now.log().requires_grad_()
    sampled = SampledWith(behaviour.log(), version.long(), 5)
    losses, metrics = built(name).corrected(logprobs, old.log(), advantages, torch.zeros(len(now)).long(), sampled)
    losses.sum().backward()
    torch.testing.assert_close(losses.detach(), expected)
    torch.testing.assert_close(logprobs.grad, slopes)
    if share is not None:
        assert metrics[share[0]].mean().item() == pytest.approx(share[1])


logs = st.lists(st.floats(-30, -1e-3), min_size=1, max_size=6)


@pytest.mark.parametrize("name", NAMES)
def test_fresh_tokens_of_the_same_weights_give_the_plain_policy_gradient(name: str) -> None:
    logprobs = torch.tensor([-0.3, -7.0, -2.0], requires_grad=True)
    advantages, rows = torch.tensor([1.0, -2.0, 0.0]), torch.tensor([0, 0, 1])
    sampled = SampledWith(logprobs.detach(), torch.full((3,), 5), 5)
    losses, metrics = built(name).corrected(logprobs, logprobs.detach(), advantages, rows, sampled)
    losses.sum().backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, -advantages)
    assert set(metrics) == set(built(name).metric_names)
    assert all(values.shape == (3,) and not values.requires_grad for values in metrics.values())
    assert not any(values.any() for key, values in metrics.items() if key.endswith("_frac"))


@pytest.mark.parametrize("name", NAMES)
@given(now=logs, gap=st.floats(-500, 500), stale=st.floats(-500, 500), advantage=st.sampled_from([1.0, 0.0, -1.0]))
def test_losses_and_gradients_are_finite(
    name: str, now: list[float], gap: float, stale: float, advantage: float
) -> None:
    logprobs = torch.tensor(now, requires_grad=True)
    old, behaviour = logprobs.detach() + gap, logprobs.detach() + stale
    sampled = SampledWith(behaviour, torch.arange(len(now)) - 1, len(now))
    losses, _ = built(name).corrected(
        logprobs, old, torch.full_like(behaviour, advantage), torch.zeros(len(now)).long(), sampled
    )
    losses.sum().backward()
    assert torch.isfinite(losses).all()
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()


@pytest.mark.parametrize("name", NAMES)
def test_other_sequences_change_nothing(name: str) -> None:
    """So neither micro-batches nor their order can."""
    torch.manual_seed(0)
    now, old, behaviour = (torch.rand(12).mul(0.9).add(0.05).log() for _ in range(3))
    advantages, rows, versions = torch.randn(12), torch.tensor([0, 0, 1, 1, 1, 2] * 2), torch.randint(0, 5, (12,))

    def losses(chosen: Tensor) -> Tensor:
        sampled = SampledWith(behaviour[chosen], versions[chosen], 5)
        return built(name).corrected(now[chosen], old[chosen], advantages[chosen], rows[chosen], sampled)[0]

    everything = losses(torch.arange(12))
    for row in range(3):
        chosen = torch.nonzero(rows == row).squeeze(-1)
        torch.testing.assert_close(losses(chosen), everything[chosen])
    shuffled = torch.randperm(12)
    torch.testing.assert_close(losses(shuffled), everything[shuffled])
    assert losses(torch.zeros(0).long()).shape == (0,)


@pytest.mark.parametrize("name", ["tis", "decoupled", "cispo", "dppo"])
def test_the_gradient_is_that_of_the_policy_whoever_sampled(name: str) -> None:
    """Over the tokens that μ samples, the mean gradient of a single step is Σ p_θ·A·∇log p_θ where no bound is hit."""
    theta = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    mu = torch.softmax(torch.tensor([0.5, 0.1, -0.3], dtype=torch.float64), 0)
    advantages = torch.tensor([1.0, -0.5, 0.2], dtype=torch.float64)
    logprobs = torch.log_softmax(theta, 0)
    [exact] = torch.autograd.grad(-(logprobs.exp() * advantages).sum(), theta, retain_graph=True)
    sampled = SampledWith(mu.log(), torch.zeros(3).long(), 1)
    losses, _ = built(name).corrected(logprobs, logprobs.detach(), advantages, torch.arange(3), sampled)
    [estimate] = torch.autograd.grad((mu * losses).sum(), theta)
    torch.testing.assert_close(estimate, exact)


def test_a_recomputed_weight_of_ppo_is_the_same_as_tis() -> None:
    loss = built("tis")
    now, old, behaviour = torch.tensor([-1.0, -2.0]), torch.tensor([-1.1, -1.9]), torch.tensor([-1.0, -4.0])
    losses, metrics = loss.corrected(
        now, old, torch.tensor([1.0, -1.0]), torch.zeros(2).long(), SampledWith(behaviour, torch.zeros(2).long(), 1)
    )
    plain, _ = PpoClip()(now, old, torch.tensor([1.0, -1.0]), torch.zeros(2).long())
    torch.testing.assert_close(losses, plain * torch.tensor([math.exp(-0.1), 2.0]))
    assert metrics["truncated_frac"].tolist() == [0.0, 1.0]


def test_a_cap_leaves_out_tokens_of_decoupled_ppo() -> None:
    actor = ActorConfig.model_validate({"correction": {"decoupled_cap": 3.0}})
    loss = build_loss(actor, "decoupled")
    assert isinstance(loss, Correction)
    old, behaviour = torch.tensor([0.4, 0.4]).log(), torch.tensor([0.2, 0.1]).log()
    losses, metrics = loss.corrected(
        old, old, torch.ones(2), torch.zeros(2).long(), SampledWith(behaviour, torch.zeros(2).long(), 1)
    )
    torch.testing.assert_close(losses, torch.tensor([-2.0, 0.0]))
    assert metrics["masked_frac"].tolist() == [0.0, 1.0]


def test_without_a_correction_the_loss_is_ppo() -> None:
    assert build_loss(ActorConfig(), "ppo") == PpoClip()
