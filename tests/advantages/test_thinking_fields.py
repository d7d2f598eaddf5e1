"""RLVCR batch fields: the requested quantity at every token of its row."""

from __future__ import annotations

import numpy as np
import pytest

from toolwise.advantages.rlvcr_tensors import thinking_fields
from toolwise.types import LevelScore, ThinkingGroup, ThinkingStep

SCORES = tuple(LevelScore(k, 3 * k, np.array([-k, -k - 1], np.float32), np.array([k, k], np.float32)) for k in (1, 2))
STEPS = [ThinkingStep(2, 6, 4, ThinkingGroup(2, SCORES, [7, 8])), ThinkingStep(1, 0, 1)]


def test_the_three_quantities_are_told_apart() -> None:
    by = {q: thinking_fields(STEPS, [2, 3], quantity=q) for q in ("action_logprob", "action_entropy")}
    np.testing.assert_array_equal(by["action_logprob"]["thinking_level_entropies"][0], [-2.5, -2.5, 0])
    np.testing.assert_array_equal(by["action_entropy"]["thinking_level_entropies"][0], [2, 2, 0])
    given = thinking_fields(STEPS, [2, 3], advantages=[0.5, np.nan])
    np.testing.assert_array_equal(given["thinking_level_entropies"][0], [0.5, 0.5, 0])


def test_a_step_without_a_group_has_nan() -> None:
    for field in (
        thinking_fields(STEPS, [2, 3], quantity="action_logprob"),
        thinking_fields(STEPS, [2, 3], advantages=[0.5, np.nan]),
    ):
        assert np.isnan(field["thinking_level_entropies"][1]).all()


def test_costs_are_thinking_tokens_and_padding_is_nothing() -> None:
    found = thinking_fields(STEPS, [2, 3], advantages=[0.0, 0.0], width=5)["thinking_token_costs"]
    assert found.tolist() == [[6, 6, 0, 0, 0], [0, 0, 0, 0, 0]]


def test_missing_advantages_are_rejected() -> None:
    with pytest.raises(ValueError, match="estimator"):
        thinking_fields(STEPS, [2, 3])


@pytest.mark.parametrize(("lengths", "advantages"), [([2], [0.5, 0.5]), ([2, 3], [0.5])])
def test_mismatched_lengths_are_rejected(lengths: list[int], advantages: list[float]) -> None:
    with pytest.raises(ValueError, match="for 2 steps; pass one per step"):
        thinking_fields(STEPS, lengths, advantages=advantages)
