"""[batch, length] arrays from NumPy or torch: same type in and out, and nothing off the mask is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from toolwise.advantages import (
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
)
from toolwise.advantages.arrays import TokenMask

REWARDS = [[0.5, 1.0, 2.0], [0.0, -1.0, 4.0], [1.0, 3.0, 9.0]]
MASK = [[1, 1, 1], [1, 0, 1], [0, 0, 0]]


def grpo(rewards: Any, mask: Any) -> tuple[Any, Any]:
    return compute_grpo_outcome_advantage(rewards, mask, ["a", "a", "a"])


def gae(rewards: Any, mask: Any) -> tuple[Any, Any]:
    return compute_gae_advantage_return(rewards, rewards, mask, 0.9, 0.8)


def reinforce(rewards: Any, mask: Any) -> tuple[Any, Any]:
    return compute_reinforce_plus_plus_outcome_advantage(rewards, mask, 0.9)


ALL = pytest.mark.parametrize("function", [grpo, gae, reinforce])


@ALL
@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16])
def test_numpy_in_numpy_out(function: Any, kind: Any) -> None:
    for out in function(np.array(REWARDS, dtype=kind), np.array(MASK)):
        assert isinstance(out, np.ndarray)
        assert out.dtype == kind
        assert out.shape == (3, 3)


@ALL
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_torch_in_torch_out(function: Any, kind: torch.dtype) -> None:
    rewards = torch.tensor(REWARDS, dtype=kind, requires_grad=True)
    for out in function(rewards, torch.tensor(MASK)):
        assert isinstance(out, torch.Tensor)
        assert out.dtype == kind
        assert not out.requires_grad


@ALL
def test_both_come_to_the_same_numbers(function: Any) -> None:
    ours = function(np.array(REWARDS), np.array(MASK))
    theirs = function(torch.tensor(REWARDS, dtype=torch.float64), torch.tensor(MASK))
    for a, b in zip(ours, theirs, strict=True):
        assert a.tolist() == b.tolist()


@ALL
def test_whole_numbers_become_single_precision(function: Any) -> None:
    assert function(np.array([[1, 2], [3, 5], [1, 1]]), np.ones((3, 2)))[0].dtype == np.float32
    assert function(torch.tensor([[1, 2], [3, 5], [1, 1]]), torch.ones(3, 2))[0].dtype == torch.float32


@ALL
def test_what_is_off_the_mask_is_never_read_and_gives_zero(function: Any) -> None:
    clean, mask = np.array(REWARDS), np.array(MASK)
    dirty = np.where(mask, clean, np.nan)
    for a, b in zip(function(clean, mask), function(dirty, mask), strict=True):
        assert a.tolist() == b.tolist()
        assert not a[mask == 0].any()


@ALL
def test_appended_masked_rows_change_nothing(function: Any) -> None:
    rewards, mask = np.array(REWARDS[:2]), np.array(MASK[:2])
    # `grpo` groups all three rows together: a row without a token must not count as one more rollout of reward 0.
    for a, b in zip(function(np.array(REWARDS), np.array(MASK)), _two(function, rewards, mask), strict=True):
        assert a[:2].tolist() == b.tolist()
        assert not a[2].any()


def _two(function: Any, rewards: Any, mask: Any) -> Any:
    return compute_grpo_outcome_advantage(rewards, mask, ["a", "a"]) if function is grpo else function(rewards, mask)


@ALL
def test_a_batch_of_nothing_but_masked_rows_is_finite(function: Any) -> None:
    for out in function(np.array(REWARDS), np.zeros((3, 3))):
        assert out.tolist() == np.zeros((3, 3)).tolist()


@ALL
def test_advantages_and_returns_are_two_arrays(function: Any) -> None:
    advantages, returns = function(torch.tensor(REWARDS), torch.tensor(MASK))
    before = returns.clone()
    advantages.fill_(7.0)
    assert torch.equal(returns, before)


def test_shapes_that_differ_are_told_by_name() -> None:
    with pytest.raises(ValueError, match=r"shapes differ: rewards \(2, 3\), values \(2, 2\), mask \(2, 3\)"):
        TokenMask.of(np.ones((2, 3)), rewards=np.ones((2, 3)), values=np.ones((2, 2)))
    with pytest.raises(ValueError, match="must be"):
        TokenMask.of(np.ones(3), rewards=np.ones(3))
