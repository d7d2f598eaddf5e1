"""The weight of each token, worked by hand, and what it does not depend on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from toolwise.errors import ConfigError
from toolwise.learner.loss_aggregation import token_weights

# Two rollouts: one of two steps with 1 and 3 tokens, one of one step with 2.
STEPS = torch.tensor([0, 1, 1, 1, 2, 2])
ROLLOUTS = torch.tensor([0, 0, 0, 0, 1, 1])

TABLE = {
    "token": [1 / 6] * 6,
    "step": [1 / 3, 1 / 9, 1 / 9, 1 / 9, 1 / 6, 1 / 6],
    "rollout": [1 / 8, 1 / 8, 1 / 8, 1 / 8, 1 / 4, 1 / 4],
    "constant": [1 / 20] * 6,
}


@pytest.mark.parametrize("how", TABLE)
def test_hand_worked_table(how: Any) -> None:
    weights = token_weights(how, STEPS, ROLLOUTS, length=10)
    assert weights.tolist() == pytest.approx(TABLE[how])


@pytest.mark.parametrize("how", TABLE)
def test_no_tokens_have_no_weights(how: Any) -> None:
    none = torch.zeros(0, dtype=torch.long)
    assert token_weights(how, none, none, length=10).tolist() == []


@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=5))
def test_all_but_the_constant_one_are_means(lengths: list[list[int]]) -> None:
    steps, rollouts, number = [], [], 0
    for rollout, of_steps in enumerate(lengths):
        for count in of_steps:
            steps += [number] * count
            rollouts += [rollout] * count
            number += 1
    for how in ("token", "step", "rollout"):
        weights = token_weights(how, torch.tensor(steps), torch.tensor(rollouts))  # type: ignore[arg-type]
        assert float(weights.sum()) == pytest.approx(1.0, abs=1e-5)


def test_weights_do_not_depend_on_the_values_of_the_indices() -> None:
    for how in ("step", "rollout"):
        plain = token_weights(how, STEPS, ROLLOUTS)  # type: ignore[arg-type]
        renamed = token_weights(how, STEPS * 7 + 100, 5 - ROLLOUTS)  # type: ignore[arg-type]
        assert torch.equal(plain, renamed)


def test_a_constant_needs_a_length() -> None:
    with pytest.raises(ConfigError, match="loss_length"):
        token_weights("constant", STEPS, ROLLOUTS)
