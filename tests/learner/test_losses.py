"""The losses of PPO, token by token, in hand-worked tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from toolwise.learner.losses import (
    GradientCheck,
    PolicyLossError,
    PpoClip,
    checked_policy_loss,
    clipped_policy_loss,
    clipped_value_loss,
    importance_weights,
)
from toolwise.protocols import PolicyLoss

# ratio, advantage, loss, whether the clip is active, d loss / d log π: with ε_low = 0.2 and ε_high = 0.3.
# The gradient is −A·ρ where the ratio counts and 0 where the clip does.
TABLE = [
    (1.0, 2.0, -2.0, False, -2.0),
    (1.2, 2.0, -2.4, False, -2.4),
    (1.5, 2.0, -2.6, True, 0.0),  # already more likely than 1.3 times: no further
    (0.9, 2.0, -1.8, False, -1.8),
    (0.5, 2.0, -1.0, False, -1.0),  # less likely but good: the plain term is the smaller one
    (1.0, -2.0, 2.0, False, 2.0),
    (1.2, -2.0, 2.4, False, 2.4),
    (1.5, -2.0, 3.0, False, 3.0),  # more likely but bad: not clipped
    (0.9, -2.0, 1.8, False, 1.8),
    (0.5, -2.0, 1.6, True, 0.0),  # already less likely than 0.8 times: no further
    (1.0, 0.0, 0.0, False, 0.0),
    (1.5, 0.0, 0.0, False, 0.0),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "clipped", "gradient"), TABLE)
def test_hand_worked_table(ratio: float, advantage: float, loss: float, clipped: bool, gradient: float) -> None:
    old = torch.tensor([-1.5])
    logprobs = (old + math.log(ratio)).requires_grad_()
    losses, active = clipped_policy_loss(logprobs, old, torch.tensor([advantage]), clip_low=0.2, clip_high=0.3)
    losses.sum().backward()
    assert losses.item() == pytest.approx(loss, abs=1e-6)
    assert active.item() is clipped
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(gradient, abs=1e-6)
    if clipped:
        assert logprobs.grad.item() == 0.0


def test_the_clip_is_asymmetric() -> None:
    def loss(ratio: float, advantage: float, low: float, high: float) -> float:
        losses, _ = clipped_policy_loss(
            torch.tensor([math.log(ratio)]),
            torch.zeros(1),
            torch.tensor([advantage]),
            clip_low=low,
            clip_high=high,
        )
        return losses.item()

    assert loss(9.0, 1.0, 0.2, 0.28) == pytest.approx(-1.28)
    assert loss(9.0, 1.0, 0.4, 0.28) == pytest.approx(-1.28)
    assert loss(0.1, -1.0, 0.2, 0.28) == pytest.approx(0.8)
    assert loss(0.1, -1.0, 0.4, 0.28) == pytest.approx(0.6)


@given(
    st.floats(-3, 3),
    st.floats(-5, 5),
    st.floats(0.01, 0.5),
    st.floats(0.01, 0.5),
)
def test_the_loss_is_never_below_either_surrogate(gap: float, advantage: float, low: float, high: float) -> None:
    gap_, a = torch.tensor([gap], dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    losses, active = clipped_policy_loss(gap_, torch.zeros(1, dtype=torch.float64), a, clip_low=low, clip_high=high)
    ratio = math.exp(gap)
    plain, bounded = ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage
    assert losses.item() == pytest.approx(-min(plain, bounded), abs=1e-9)
    if active.item():
        assert (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low)


def test_same_log_probs_give_minus_the_advantage_and_the_plain_policy_gradient() -> None:
    logprobs = torch.tensor([-0.3, -7.0, -2.0], requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.0])
    losses, active = clipped_policy_loss(logprobs, logprobs.detach(), advantages, clip_low=0.2, clip_high=0.2)
    losses.sum().backward()
    assert torch.equal(losses.detach(), -advantages)
    assert logprobs.grad is not None
    assert torch.equal(logprobs.grad, -advantages)
    assert not active.any()


@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("gap", [-500.0, -100.0, 100.0, 500.0])
def test_huge_ratios_stay_finite(gap: float, advantage: float) -> None:
    """exp(100) is infinite in fp32, and infinity times a zero gradient is not a number."""
    logprobs = torch.tensor([gap], requires_grad=True)
    losses, _ = clipped_policy_loss(logprobs, torch.zeros(1), torch.tensor([advantage]), clip_low=0.2, clip_high=0.2)
    losses.sum().backward()
    assert torch.isfinite(losses).all()
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()


def test_no_tokens_give_no_loss() -> None:
    none = torch.zeros(0, requires_grad=True)
    losses, active = clipped_policy_loss(none, torch.zeros(0), torch.zeros(0), clip_low=0.2, clip_high=0.2)
    losses.sum().backward()
    assert losses.sum().item() == 0.0
    assert active.shape == (0,)


def test_inputs_are_left_alone() -> None:
    logprobs, old, advantages = torch.tensor([-1.0]), torch.tensor([-3.0]), torch.tensor([2.0])
    clipped_policy_loss(logprobs, old, advantages, clip_low=0.2, clip_high=0.2)
    assert (logprobs.item(), old.item(), advantages.item()) == (-1.0, -3.0, 2.0)


# ratio, advantage, loss, whether a clip is active, d loss / d log π: the same clips and c = 3.
DUAL = [
    (2.0, -2.0, 4.0, False, 4.0),
    (2.9, -2.0, 5.8, False, 5.8),
    (3.5, -2.0, 6.0, True, 0.0),  # a bad token far likelier than it was: no more than 3 times its advantage
    (90.0, -2.0, 6.0, True, 0.0),
    (0.5, -2.0, 1.6, True, 0.0),  # the other side is the plain clip's
    (90.0, 2.0, -2.6, True, 0.0),  # good tokens never meet it
    (90.0, 0.0, 0.0, False, 0.0),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "clipped", "gradient"), DUAL)
def test_hand_worked_table_of_the_dual_clip(
    ratio: float, advantage: float, loss: float, clipped: bool, gradient: float
) -> None:
    old = torch.tensor([-1.5])
    logprobs = (old + math.log(ratio)).requires_grad_()
    losses, active = clipped_policy_loss(
        logprobs, old, torch.tensor([advantage]), clip_low=0.2, clip_high=0.3, dual_clip=3.0
    )
    losses.sum().backward()
    assert losses.item() == pytest.approx(loss, abs=1e-5)
    assert active.item() is clipped
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(gradient, abs=1e-5)


# value, old value, return, loss, whether the clip is active, d loss / d value: with ε = 0.2.
VALUES = [
    (1.0, 1.0, 3.0, 2.0, False, -2.0),
    (1.1, 1.0, 3.0, 1.805, False, -1.9),
    (1.5, 1.0, 3.0, 1.62, True, 0.0),  # moved 0.5 towards the return: 0.2 is enough for one update
    (0.5, 1.0, 3.0, 3.125, False, -2.5),  # moved away: the plain loss is the larger one
    (1.5, 1.0, 1.0, 0.125, False, 0.5),  # moved away upwards
    (0.5, 1.0, -1.0, 1.62, True, 0.0),
    (1.5, 1.0, 1.5, 0.045, True, 0.0),  # arrived, by more than one update may go
]


@pytest.mark.parametrize(("value", "old", "target", "loss", "clipped", "gradient"), VALUES)
def test_hand_worked_table_of_the_value_clip(
    value: float, old: float, target: float, loss: float, clipped: bool, gradient: float
) -> None:
    values = torch.tensor([value], requires_grad=True)
    losses, active = clipped_value_loss(values, torch.tensor([old]), torch.tensor([target]), clip=0.2)
    losses.sum().backward()
    assert losses.item() == pytest.approx(loss, abs=1e-5)
    assert active.item() is clipped
    assert values.grad is not None
    assert values.grad.item() == pytest.approx(gradient, abs=1e-5)


def test_without_a_clip_the_value_loss_is_half_the_square() -> None:
    losses, active = clipped_value_loss(torch.tensor([5.0]), torch.tensor([0.0]), torch.tensor([2.0]), clip=None)
    assert losses.item() == 4.5
    assert not active.any()


def test_importance_weights_are_capped_and_carry_no_gradient() -> None:
    old = torch.tensor([-1.0, -1.0, -1.0, 0.0], requires_grad=True)
    drawn = torch.tensor([-1.0, -1.0 + math.log(2), -3.0, -500.0])
    weights = importance_weights(old, drawn, cap=2.0)
    assert weights.tolist() == pytest.approx([1.0, 0.5, 2.0, 2.0])
    assert not weights.requires_grad


class Mine(PolicyLoss):
    """Returns what it is told to."""

    def __init__(self, result: Callable[[Tensor], Any], metric_names: tuple[str, ...] = ()) -> None:
        self.result = result
        self._names = metric_names

    @property
    def metric_names(self) -> tuple[str, ...]:
        return self._names

    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequences: Tensor) -> Any:
        return self.result(logprobs)


def called(loss: PolicyLoss, logprobs: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True) if logprobs is None else logprobs
    return checked_policy_loss(loss, logprobs, torch.tensor([-1.5, -1.5]), torch.ones(2), torch.zeros(2))


def test_the_built_in_loss_is_the_function_above() -> None:
    losses, metrics = called(PpoClip(0.1, 0.3, None))
    wanted, active = clipped_policy_loss(
        torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.5]), torch.ones(2), clip_low=0.1, clip_high=0.3
    )
    assert torch.equal(losses, wanted)
    assert torch.equal(metrics["clip_frac"], active.float())


def test_a_loss_of_one_s_own_keeps_its_gradient_and_its_metrics_have_none() -> None:
    losses, metrics = called(Mine(lambda logprobs: (-logprobs, {"a": 2 * logprobs}), ("a",)))
    assert losses.tolist() == [1.0, 2.0]
    assert losses.requires_grad
    assert not metrics["a"].requires_grad


@pytest.mark.parametrize(
    ("result", "names", "told"),
    [
        (lambda x: -x, (), "returned a Tensor; return a tuple (losses, metrics)"),
        (lambda x: (-x.sum(), {}), (), "returned losses of shape () for 2 tokens; return one value per token"),
        (lambda x: (-1.0, {}), (), "returned losses of shape float for 2 tokens"),
        (lambda x: (-x, {"a": x.mean()}), ("a",), "returned a of shape () for 2 tokens"),
        (lambda x: (-x, {"a": x}), ("b",), "returned the metrics a, but metric_names are b"),
        (lambda x: (-x.double(), {}), (), "returned losses of torch.float64, but logprobs are torch.float32; return"),
        (
            lambda x: (-x, {"a": x.to(torch.complex64)}),
            ("a",),
            "returned a of torch.complex64 on cpu; return real",
        ),
        (lambda x: (-x, {}), None, "failed: TypeError: 'NoneType' object is not iterable"),
        (lambda x: (-x.detach(), {}), (), "returned losses without a gradient; compute them from logprobs"),
        (
            lambda x: (x / torch.tensor([1.0, 0.0]), {}),
            (),
            "returned -inf for 1 of 2 tokens, the first with log-prob -2, old log-prob -1.5 and advantage 1; bound the",
        ),
        (
            lambda x: (x[5], {}),
            (),
            "failed: IndexError: index 5 is out of bounds for dimension 0 with size 2 (" + __file__,
        ),
    ],
)
def test_a_bad_loss_is_an_error_in_one_line(result: Any, names: tuple[str, ...], told: str) -> None:
    with pytest.raises(PolicyLossError) as caught:
        called(Mine(result, names))
    assert str(caught.value).startswith(f"actor.policy_loss: Mine {told}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("leaks", [True, False])
def test_what_it_changes_for_the_whole_process_is_restored(leaks: bool) -> None:
    def leaking(logprobs: Tensor) -> Any:
        losses = -logprobs
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        if leaks:
            raise ValueError
        return losses, {}

    with pytest.raises(PolicyLossError) if leaks else nullcontext():
        called(Mine(leaking))
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32
    assert torch.zeros(1).device.type == "cpu"


def test_a_loss_that_does_not_depend_on_the_log_probs_is_refused_at_the_first_update() -> None:
    def observed(loss: Callable[[Tensor], Tensor]) -> GradientCheck:
        logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
        check = GradientCheck(Mine(None))  # type: ignore[arg-type]
        check.observe(loss(logprobs), logprobs)
        return check

    with pytest.raises(PolicyLossError, match=r"^actor\.policy_loss: Mine: its losses do not depend on logprobs"):
        observed(lambda logprobs: torch.ones(2, requires_grad=True))
    with pytest.raises(PolicyLossError, match=r"is 0 for every token, though there are advantages"):
        observed(lambda logprobs: 0 * logprobs).require(torch.tensor([0.0, 1.0]))
    observed(lambda logprobs: 0 * logprobs).require(torch.zeros(2))  # nothing to learn: the next update tells
    check = observed(lambda logprobs: logprobs * torch.tensor([0.0, 1.0]))
    check.require(torch.ones(2))
    check.observe(torch.ones(2), torch.ones(2))  # once is enough


def test_a_gradient_that_fails_names_the_line_of_the_file() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    losses = 2 * logprobs
    losses.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(PolicyLossError, match=rf"its gradient failed: ZeroDivisionError: .* \({__file__}:\d+\)$"):
        GradientCheck(Mine(None)).observe(losses, logprobs)  # type: ignore[arg-type]


def test_a_subclass_of_the_built_in_loss_is_checked_too() -> None:
    class Summed(PpoClip):
        def __call__(self, *tensors: Tensor) -> Any:
            losses, metrics = super().__call__(*tensors)
            return losses.sum(), metrics

    with pytest.raises(PolicyLossError, match=r"Summed returned losses of shape \(\)"):
        called(Summed())


def test_a_model_that_diverged_is_not_the_loss_s_fault() -> None:
    losses, _ = called(Mine(lambda x: (-x, {})), torch.tensor([torch.nan, -1.0], requires_grad=True))
    assert torch.isnan(losses[0])
