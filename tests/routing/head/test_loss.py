"""Gradients of the router's losses against finite differences of their objectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from toolwise.routing.head.head import HeadSettings, RouterHead
from toolwise.routing.head.loss import (
    NO_LABEL,
    RouterBatch,
    calibration_error,
    entropies,
    expected_loss,
    label_loss,
    sampled_loss,
    value_loss,
)
from toolwise.routing.samples import RoutePrediction, RouterExample, RouteSample

ROUTES = ("ANSWER", "SEARCH-FAMILY", "CALCULATE-FAMILY")
REWARDS = torch.tensor([[0.2, 0.9, 0.1], [1.0, 0.8, 0.7], [0.0, 0.1, 0.6]], dtype=torch.float64)
COSTS = torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.5, 1.0], [0.0, 2.0, 1.0]], dtype=torch.float64)
FEATURES = torch.randn(3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def wild_head(mode: Any = "policy") -> RouterHead:
    made = RouterHead(HeadSettings(width=6, routes=ROUTES, hidden=5, seed=1, mode=mode)).double()
    generator = torch.Generator().manual_seed(1)
    for weight in made.parameters():
        weight.data += 0.3 * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    return made


def differences(head: RouterHead, objective: Callable[[], float], eps: float = 1e-6) -> list[Tensor]:
    """The gradient of `objective` by central differences."""
    found = []
    with torch.no_grad():
        for weight in head.parameters():
            slopes = torch.zeros_like(weight)
            for place in range(weight.numel()):
                flat, values = weight.view(-1), []
                before = float(flat[place])
                for moved in (before + eps, before - eps):
                    flat[place] = moved
                    values.append(objective())
                flat[place] = before
                slopes.view(-1)[place] = (values[0] - values[1]) / (2 * eps)
            found.append(slopes)
    return found


def gradients(head: RouterHead, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(head.parameters()), retain_graph=True))


@pytest.mark.parametrize("price", [0.0, 0.7])
@pytest.mark.parametrize("clip", [None, 0.2])
def test_stratified_gradient_is_that_of_the_expected_reward(price: float, clip: float | None) -> None:
    """d/dθ of −Σ_a π(a|x)·(r − λc): independent of rollout counts and of the baseline."""
    head, q = wild_head(), REWARDS - price * COSTS
    logits = head(FEATURES)
    old = logits.detach().log_softmax(-1)
    advantages = q - (old.exp() * q).sum(-1, keepdim=True)
    loss = expected_loss(logits, advantages, torch.ones(3, 3, dtype=torch.bool), old, clip=clip)
    pulls = gradients(head, loss)
    slopes = differences(head, lambda: -float((head(FEATURES).softmax(-1) * q).sum()))
    for found, expected in zip(pulls, slopes, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_independent_gradient_is_that_of_the_weighted_log_probs(clip: float | None) -> None:
    head = wild_head()
    of, actions = torch.tensor([0, 0, 1, 1, 2]), torch.tensor([0, 1, 2, 2, 1])
    advantages = torch.tensor([0.5, -0.5, 0.3, -0.3, 0.9], dtype=torch.float64)
    logits = head(FEATURES)
    old = logits.detach().log_softmax(-1)[of, actions]
    loss = sampled_loss(logits, of, actions, advantages, old, clip=clip)
    pulls = gradients(head, loss)
    slopes = differences(head, lambda: -float((head(FEATURES).log_softmax(-1)[of, actions] * advantages).sum()))
    for found, expected in zip(pulls, slopes, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-8, rtol=1e-6)


def test_sampled_routes_give_the_stratified_gradient_on_average() -> None:
    """Every route weighted by its probability: the limit of many samples."""
    head = wild_head()
    logits, q = head(FEATURES), REWARDS - 0.5 * COSTS
    old = logits.detach().log_softmax(-1)
    advantages = q - (old.exp() * q).sum(-1, keepdim=True)
    of, actions = torch.arange(3).repeat_interleave(3), torch.arange(3).repeat(3)
    chance = old.exp()[of, actions]
    drawn = sampled_loss(logits, of, actions, advantages[of, actions] * chance, old[of, actions], clip=None)
    strata = expected_loss(logits, advantages, torch.ones(3, 3, dtype=torch.bool), old, clip=None)
    for a, b in zip(gradients(head, drawn), gradients(head, strata), strict=True):
        torch.testing.assert_close(a, b)


def test_entropy_and_label_gradients_are_right() -> None:
    head = wild_head()
    labels = torch.tensor([1, NO_LABEL, 0])
    found = gradients(head, label_loss(head(FEATURES), labels) - 0.1 * entropies(head(FEATURES)).sum())

    def objective() -> float:
        p = head(FEATURES).softmax(-1)
        return float(-p[0, 1].log() - p[2, 0].log() + 0.1 * (p * p.log()).sum())

    for a, b in zip(found, differences(head, objective), strict=True):
        torch.testing.assert_close(a, b, atol=1e-8, rtol=1e-6)


def test_value_gradient_is_right() -> None:
    head = wild_head("value")
    of, actions = torch.tensor([0, 2]), torch.tensor([1, 1])
    targets = torch.stack([REWARDS[of, actions], COSTS[of, actions]], dim=-1)
    found = gradients(head, value_loss(head(FEATURES), of, actions, targets))

    def objective() -> float:
        out = head(FEATURES)
        return float(((out[0, 1] - targets[0]) ** 2).sum() + ((out[2, 1] - targets[1]) ** 2).sum())

    for a, b in zip(found, differences(head, objective), strict=True):
        torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-6)


def test_a_route_without_an_advantage_has_no_gradient() -> None:
    logits = torch.zeros(1, 3, requires_grad=True)
    has_advantage = torch.tensor([[True, False, True]])
    losses = [
        expected_loss(
            logits, torch.tensor([[0.5, absent, -0.5]]), has_advantage, logits.detach().log_softmax(-1), clip=None
        )
        for absent in (0.0, float("nan"))
    ]
    first, again = (torch.autograd.grad(loss, logits)[0] for loss in losses)
    assert torch.equal(first, again)
    assert first.isfinite().all()
    assert first[0, 1] == 0


def test_clipped_ratios_have_no_gradient() -> None:
    logits = torch.tensor([[2.0, 0.0, 0.0]], requires_grad=True)
    old = torch.zeros(1, 3).log_softmax(-1)
    of, action, better = torch.tensor([0]), torch.tensor([0]), torch.tensor([1.0])
    drawn = sampled_loss(logits, of, action, better, old[0, :1], clip=0.2)
    assert torch.autograd.grad(drawn, logits)[0].abs().max() == 0
    strata = expected_loss(logits, torch.tensor([[1.0, 0.0, 0.0]]), torch.ones(1, 3, dtype=torch.bool), old, clip=0.2)
    assert torch.autograd.grad(strata, logits)[0].abs().max() == 0
    worse = sampled_loss(logits, of, action, -better, old[0, :1], clip=0.2)
    assert torch.autograd.grad(worse, logits)[0].abs().max() > 0  # a move in the wrong direction is not clipped


def test_without_labels_there_is_no_gradient() -> None:
    logits = torch.randn(2, 3, requires_grad=True)
    loss = label_loss(logits, torch.tensor([NO_LABEL, NO_LABEL]))
    assert loss.item() == 0
    assert torch.autograd.grad(loss, logits)[0].abs().max() == 0


def test_calibration_error_by_hand() -> None:
    predictions = torch.tensor([0.1, 0.1, 0.8, 0.8])
    outcomes = torch.tensor([0.0, 0.0, 1.0, 0.0])
    assert calibration_error(predictions, outcomes, bins=2) == pytest.approx((0.1 + 0.3) / 2)
    assert calibration_error(torch.tensor([0.5, 0.5]), torch.tensor([0.0, 1.0]), bins=1) == 0
    assert calibration_error(torch.zeros(0), torch.zeros(0)) == 0


LIKE = torch.zeros(1)
SEEN = RoutePrediction((-1.0, -2.0, -3.0), rewards=(0.1, 0.2, 0.3), costs=((1.0,), (2.0,), (3.0,)))


def examples() -> list[RouterExample]:
    return [
        RouterExample(
            SEEN, (RouteSample(0, 1.0, (0.0,), 0.5), RouteSample(2, 0.0, (1.0,), -0.5)), (0.5, None, -0.5), label=1
        ),
        RouterExample(SEEN, (RouteSample(1, 0.25, (2.0,), 0.75),), (None, 0.75, None)),
    ]


def test_rollouts_point_to_their_example() -> None:
    batch = RouterBatch(examples(), LIKE)
    assert batch.prompt_index.tolist() == [0, 0, 1]
    assert batch.actions.tolist() == [0, 2, 1]
    assert batch.sampled_advantages.tolist() == [0.5, -0.5, 0.75]
    assert batch.targets.tolist() == [[1.0, 0.0], [0.0, 1.0], [0.25, 2.0]]
    assert batch.labels.tolist() == [1, NO_LABEL]


def test_routes_without_a_rollout_have_no_advantage() -> None:
    batch = RouterBatch(examples(), LIKE)
    assert batch.has_advantage.tolist() == [[True, False, True], [False, True, False]]
    assert batch.advantages is not None
    assert batch.advantages.tolist() == [[0.5, 0.0, -0.5], [0.0, 0.75, 0.0]]


def test_sampled_routes_have_no_advantages_per_route() -> None:
    drawn = [RouterExample(SEEN, (RouteSample(0, 1.0, (0.0,), 0.5),))]
    assert RouterBatch(drawn, LIKE).advantages is None


def test_predictions_are_per_route() -> None:
    assert RouterBatch(examples(), LIKE).predictions[1, 2].tolist() == torch.tensor([0.3, 3.0]).tolist()


def test_parts_add_up_to_the_batch() -> None:
    first, second = RouterBatch(examples(), LIKE).parts(1)
    assert first.actions.tolist() == [0, 2]
    assert second.actions.tolist() == [1]
    assert second.prompt_index.tolist() == [0]


def test_a_route_that_does_not_apply_gets_no_gradient_and_no_probability() -> None:
    mask = (True, False, True)
    prediction = RoutePrediction((0.0, 0.0, 0.0)).restricted(mask)
    example = RouterExample(prediction, (RouteSample(2, 1.0, (0.0,), 0.7),), (0.3, None, -0.2), label=2)
    batch = RouterBatch([example], torch.zeros(1, dtype=torch.float64))
    logits = torch.tensor([[0.1, 5.0, -0.4]], dtype=torch.float64, requires_grad=True)
    masked = batch.masked(logits)
    assert masked.softmax(-1)[0, 1] == 0
    losses = [
        expected_loss(masked, batch.advantages, batch.has_advantage, batch.old_logprobs, clip=None),
        sampled_loss(masked, batch.prompt_index, batch.actions, batch.sampled_advantages, torch.zeros(1), clip=None),
        label_loss(masked, batch.labels),
        entropies(masked).sum(),
    ]
    for loss in losses:
        (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
        assert gradient.isfinite().all()
        assert gradient[0, 1] == 0
        assert gradient.abs().sum() > 0
    two = torch.tensor([[0.1, -0.4]], dtype=torch.float64)
    assert float(entropies(masked.detach())) == pytest.approx(float(entropies(two)))
