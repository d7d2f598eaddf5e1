"""The optimiser: the reported norms are correct in every precision, and its state is complete."""

from __future__ import annotations

import copy

import pytest
import torch

from toolwise.config.schema import ActorConfig
from toolwise.learner.optimizer import Optimizer


def weights(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in ((3, 4), (5,))]


def pull(held: list[torch.nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in held:
        found = torch.randn(weight.shape, generator=generator).to(weight.dtype)
        weight.grad = found if weight.grad is None else weight.grad + found


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_the_update_norm_is_the_distance_the_weights_moved(weight_decay: float) -> None:
    held = weights()
    optimizer = Optimizer(held, ActorConfig(lr=0.01, weight_decay=weight_decay), total_steps=6)
    for step in range(1, 5):
        before = [w.detach().clone() for w in held]
        pull(held, step)
        gradient = torch.cat([w.grad.flatten() for w in held if w.grad is not None]).norm()
        told = optimizer.step(step)
        moved = torch.cat([(w.detach() - b).flatten() for w, b in zip(held, before, strict=True)]).norm()
        assert told["grad_norm"] == pytest.approx(float(gradient), rel=1e-5)
        assert told["update_norm"] == pytest.approx(float(moved), rel=1e-4)
        assert all(w.grad is None for w in held)


def test_gradients_of_half_precision_are_added_up_in_full() -> None:
    held = [torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))]
    optimizer = Optimizer(held, ActorConfig(lr=0.1, max_grad_norm=1e9), total_steps=6)
    for value in (256.0, *[1.0] * 8):  # in bf16 256 + 1 is 256
        held[0].grad = torch.tensor([value], dtype=torch.bfloat16)
        optimizer.accumulate_gradients()
    assert optimizer.step(1)["grad_norm"] == 264.0


def test_a_step_too_small_for_half_precision_is_not_lost() -> None:
    held = [torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))]
    optimizer = Optimizer(held, ActorConfig(lr=1e-6), total_steps=6)
    for step in range(1, 4):
        held[0].grad = torch.ones(4, dtype=torch.bfloat16)
        optimizer.accumulate_gradients()
        optimizer.step(step)
    assert torch.equal(held[0].detach(), torch.ones(4, dtype=torch.bfloat16))
    assert float(optimizer.masters[0][0]) == pytest.approx(1.0 - 3e-6, abs=2e-7)


def test_frozen_weights_are_left_alone() -> None:
    held = weights()
    held[1].requires_grad_(False)
    optimizer = Optimizer(held, ActorConfig(lr=0.1, weight_decay=0.5), total_steps=6)
    before = held[1].detach().clone()
    pull(held[:1], 0)
    optimizer.step(1)
    assert torch.equal(held[1].detach(), before)
    assert len(optimizer.weights) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resuming_from_a_saved_state_changes_nothing(dtype: torch.dtype) -> None:
    config = ActorConfig(lr=0.01, lr_schedule="cosine", weight_decay=0.01)

    def run(held: list[torch.nn.Parameter], optimizer: Optimizer, steps: range) -> None:
        for step in steps:
            pull(held, step)
            optimizer.accumulate_gradients()
            optimizer.step(step)

    straight = weights(dtype)
    run(straight, Optimizer(straight, config, total_steps=6), range(1, 7))
    first = weights(dtype)
    optimizer = Optimizer(first, config, total_steps=6)
    run(first, optimizer, range(1, 4))
    second = copy.deepcopy(first)
    resumed = Optimizer(second, config, total_steps=6)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(second, resumed, range(4, 7))
    assert all(torch.equal(a, b) for a, b in zip(straight, second, strict=True))


def test_a_new_learning_rate_overrides_the_saved_one() -> None:
    moved = []
    for rate in (0.01, 0.1):
        held = weights()
        optimizer = Optimizer(held, ActorConfig(lr=0.01), total_steps=6)
        pull(held, 1)
        optimizer.step(1)
        resumed = Optimizer(held, ActorConfig(lr=rate), total_steps=6)
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        before = [weight.detach().clone() for weight in held]
        pull(held, 2)
        resumed.step(2)
        moved.append(sum(float((a.detach() - b).norm()) for a, b in zip(held, before, strict=True)))
    assert moved[1] == pytest.approx(10 * moved[0], rel=1e-4)
