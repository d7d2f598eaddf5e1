"""How rows are split into optimiser steps."""

from __future__ import annotations

import pytest
from learner_cases import credit, sample, tiny_model

from toolwise.learner.batch import Batch, build_batch
from toolwise.learner.mini_batches import mini_batches


def batch(rollouts: int, groups_of: int | None = None) -> Batch:
    return build_batch(sample(tiny_model(), [1.0] * rollouts, groups_of=groups_of))


def steps(found: Batch, count: int, epochs: int = 1, seed: str = "0") -> list[list[int]]:
    return list(mini_batches(found, count=count, epochs=epochs, seed=seed))


def test_each_epoch_covers_every_row_once_in_a_new_order() -> None:
    found = batch(8)
    seen = steps(found, 4, epochs=4)
    epochs = [seen[at : at + 4] for at in range(0, 16, 4)]
    assert all(sorted(row for step in epoch for row in step) == list(range(8)) for epoch in epochs)
    assert all(len(step) == 2 for step in seen)
    assert len({str(epoch) for epoch in epochs}) == 4
    assert steps(found, 4, epochs=4) == seen
    assert steps(found, 4, epochs=4, seed="1") != seen


def test_one_step_takes_all_rows_in_their_order() -> None:
    assert steps(batch(5), 1, epochs=2) == [[0, 1, 2, 3, 4]] * 2


def test_groups_stay_together_if_there_are_enough() -> None:
    found = batch(12, groups_of=3)
    for step in steps(found, 2):
        groups = [found.group_of_rollout[found.rollout_of_row[row]] for row in step]
        assert sorted(groups.count(name) for name in set(groups)) == [3, 3]


def test_with_fewer_groups_than_steps_groups_are_split() -> None:
    assert [len(step) for step in steps(batch(6, groups_of=3), 3)] == [2, 2, 2]


@pytest.mark.parametrize("count", [4, 99])
def test_no_step_is_empty(count: int) -> None:
    assert [len(step) for step in steps(batch(4), count)] == [1, 1, 1, 1]


def test_rows_of_one_rollout_are_in_the_same_step() -> None:
    forked = [credit([([i, 6, 7], [8], [-1.0]), ([9, 9, i], [8, 8], [-1.0, -1.0])], 1.0) for i in (2, 3, 4)]
    found = build_batch(forked)
    assert len(found.rows) == 6
    assert sorted(map(tuple, steps(found, 3))) == [(0, 1), (2, 3), (4, 5)]


def test_rows_without_trainable_tokens_are_left_out() -> None:
    masked = credit([([5, 6, 7], [], [])], 1.0)
    found = build_batch([masked, *sample(tiny_model(), [1.0, 1.0]), masked])
    assert steps(found, 1) == [[1, 2]]
