"""The optimiser: the reported norms are correct in every precision, and its state is complete."""

from __future__ import annotations

import copy

import pytest
import torch

from toolwise.config.schema import ActorConfig, OptimizerState
from toolwise.learner.optimizer import Optimizer


def weights(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in ((3, 4), (5,))]


def pull(held: list[torch.nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in held:
        found = torch.randn(weight.shape, generator=generator).to(weight.dtype)
        weight.grad = found if weight.grad is None else weight.grad + found


@pytest.mark.parametrize("state", ["fp32", "bf16", "cpu"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_the_update_norm_is_the_distance_the_weights_moved(weight_decay: float, state: OptimizerState) -> None:
    held = weights()
    optimizer = Optimizer(held, ActorConfig(lr=0.01, weight_decay=weight_decay), total_steps=6, state=state)
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


@pytest.mark.parametrize("state", ["fp32", "bf16", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resuming_from_a_saved_state_changes_nothing(dtype: torch.dtype, state: OptimizerState) -> None:
    config = ActorConfig(lr=0.01, lr_schedule="cosine", weight_decay=0.01)

    def run(held: list[torch.nn.Parameter], optimizer: Optimizer, steps: range) -> None:
        for step in steps:
            pull(held, step)
            optimizer.accumulate_gradients()
            optimizer.step(step)

    straight = weights(dtype)
    run(straight, Optimizer(straight, config, total_steps=6, state=state), range(1, 7))
    first = weights(dtype)
    optimizer = Optimizer(first, config, total_steps=6, state=state)
    run(first, optimizer, range(1, 4))
    second = copy.deepcopy(first)
    resumed = Optimizer(second, config, total_steps=6, state=state)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed.sync_masters()  # as after loading weights
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


def trained(
    state: OptimizerState, dtype: torch.dtype = torch.float32, steps: int = 6
) -> tuple[Optimizer, list[torch.nn.Parameter]]:
    held = weights(dtype)
    optimizer = Optimizer(held, ActorConfig(lr=0.01, weight_decay=0.1, max_grad_norm=1e9), total_steps=9, state=state)
    for step in range(1, steps + 1):
        for part in range(2):  # two micro-batches
            pull(held, 10 * step + part)
            optimizer.accumulate_gradients()
        optimizer.step(step)
    return optimizer, held


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_on_the_cpu_gives_the_same_weights_bit_by_bit(dtype: torch.dtype) -> None:
    (_, one), (offloaded, other) = trained("fp32", dtype), trained("cpu", dtype)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    tensors = [*offloaded.masters, *(v for s in offloaded.adamw.state.values() for v in s.values())]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}
    assert not {m.data_ptr() for m in offloaded.masters} & {w.data_ptr() for w in other}
    assert all(weight.grad is None for weight in other)


def test_moments_in_bf16_take_half_the_memory() -> None:
    full, half = (trained(state)[0].adamw.state for state in ("fp32", "bf16"))
    sizes = [sum(s[n].nbytes for s in state.values() for n in ("exp_avg", "exp_avg_sq")) for state in (full, half)]
    assert sizes == [2 * 4 * 17, 2 * 2 * 17]


def descend(state: OptimizerState, steps: int = 300) -> tuple[float, torch.Tensor]:
    """A noisy least-squares problem, as stochastic gradients are: its loss in the end, and the weights."""
    generator = torch.Generator().manual_seed(1)
    inputs, target = torch.randn(256, 64, generator=generator), torch.randn(64, generator=generator)
    weight = torch.nn.Parameter(torch.zeros(64))
    optimizer = Optimizer([weight], ActorConfig(lr=0.02, max_grad_norm=1e9), total_steps=steps, state=state)
    for step in range(1, steps + 1):
        rows = torch.randint(0, 256, (32,), generator=generator)
        noise = 0.5 * torch.randn(32, generator=generator)
        loss = (inputs[rows] @ weight - inputs[rows] @ target - noise).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step(step)
    return float((inputs @ (weight.detach() - target)).square().mean()), weight.detach()


def test_moments_in_bf16_learn_what_those_in_fp32_learn() -> None:
    """Measured: the weights differ by 0.02 % of their norm after 300 steps, and the losses by 0.07 %."""
    (loss, weight), (rounded_loss, rounded) = descend("fp32"), descend("bf16")
    assert float((weight - rounded).norm() / weight.norm()) < 0.005
    assert rounded_loss == pytest.approx(loss, rel=0.05)


def test_moments_follow_a_constant_gradient_to_its_value() -> None:
    """Nearest rounding stops short of it by at most a few steps of bf16."""
    held = [torch.nn.Parameter(torch.zeros(3))]
    optimizer = Optimizer(held, ActorConfig(lr=1e-3, max_grad_norm=1e9), total_steps=400, state="bf16")
    gradient = torch.tensor([1.0, -3e-4, 700.0])
    for step in range(1, 400):
        held[0].grad = gradient.clone()
        optimizer.step(step)
    state = optimizer.adamw.state[held[0]]
    torch.testing.assert_close(state["exp_avg"].float(), gradient, rtol=0.03, atol=0.0)
    torch.testing.assert_close(state["exp_avg_sq"].float(), gradient.square(), rtol=0.08, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("before", ["fp32", "bf16", "cpu"])
@pytest.mark.parametrize("after", ["fp32", "bf16", "cpu"])
def test_a_run_may_go_on_with_its_state_elsewhere(
    before: OptimizerState, after: OptimizerState, dtype: torch.dtype
) -> None:
    optimizer, held = trained(before, dtype, steps=3)
    moved = copy.deepcopy(held)
    resumed = Optimizer(moved, ActorConfig(lr=0.01, max_grad_norm=1e9), total_steps=9, state=after)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed.sync_masters()
    for one, other in zip(optimizer.masters, resumed.masters, strict=True):
        assert torch.equal(one.detach(), other.detach())
        for name, rtol in (("step", 0.0), ("exp_avg", 0.004), ("exp_avg_sq", 0.004)):
            a, b = (o.adamw.state[m][name].float() for o, m in ((optimizer, one), (resumed, other)))
            torch.testing.assert_close(a, b, rtol=rtol, atol=0.0)
    pull(moved, 99)
    resumed.accumulate_gradients()
    assert resumed.step(4)["update_norm"] > 0.0
