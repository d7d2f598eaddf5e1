"""Mixtures of sources: shares, coverage, resuming, and mixtures that cannot be."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolwise.data import Batches
from toolwise.data.mixture import mixture_order
from toolwise.data.sampled_batches import SampledBatches, build_sampler
from toolwise.data.task_set import TaskSet
from toolwise.errors import CheckpointError, ConfigError
from toolwise.messages import Message
from toolwise.types import Task


def mixture(*sources: tuple[int, float]) -> TaskSet:
    message = Message(role="user", content="?")
    parts = [
        [Task(task_id=f"{index}/{number}", prompt=[message]) for number in range(size)]
        for index, (size, _) in enumerate(sources)
    ]
    return TaskSet(parts, [weight for _, weight in sources])


def drawn(batches: Batches, count: int) -> list[str]:
    return [task.task_id for batch in islice(batches, count) for task in batch]


def test_an_epoch_by_hand() -> None:
    # 6 tasks in the shares 1 : 2 are 2 of the first source and 4 of the second, which has two and begins again
    assert mixture_order([(4, 1.0), (2, 2.0)], 0, 0, shuffle=False).tolist() == [4, 0, 5, 4, 1, 5]
    assert mixture_order([(4, 1.0), (2, 2.0)], 0, 1, shuffle=False).tolist() == [4, 2, 5, 4, 3, 5]


@settings(deadline=None, max_examples=50)
@given(
    sources=st.lists(st.tuples(st.integers(1, 9), st.floats(0.2, 5)), min_size=1, max_size=4),
    seed=st.integers(0, 99),
    shuffle=st.booleans(),
)
def test_shares_hold_and_no_task_comes_again_before_all_of_its_source(
    sources: list[tuple[int, float]], seed: int, shuffle: bool
) -> None:
    total, weights = sum(size for size, _ in sources), sum(weight for _, weight in sources)
    try:
        epochs = [mixture_order(sources, seed, epoch, shuffle=shuffle).tolist() for epoch in range(5)]
    except ConfigError:
        assert min(weight for _, weight in sources) / weights * total < 1
        return
    start = 0
    for size, weight in sources:
        of_source = [[index for index in epoch if start <= index < start + size] for epoch in epochs]
        assert all(abs(len(part) - weight / weights * total) < 1 for part in of_source)
        counts = Counter(index for part in of_source for index in part)
        assert max(counts.values()) - min(counts[start + number] for number in range(size)) <= 1
        start += size
    assert all(len(epoch) == total for epoch in epochs)


@pytest.mark.parametrize("before", [0, 3, 7, 12])
def test_a_mixture_resumes_at_the_exact_position(before: int) -> None:
    first, second = (Batches(mixture((9, 1), (4, 2.5)), 2, seed=1) for _ in range(2))
    drawn(first, before)
    second.load_state_dict(first.state_dict())
    assert drawn(first, 20) == drawn(second, 20)


def test_other_weights_are_refused_on_resume() -> None:
    state = Batches(mixture((4, 1), (4, 2)), 2, seed=0).state_dict()
    for other in (mixture((4, 1), (4, 3)), [*mixture((4, 1), (4, 2))]):
        with pytest.raises(CheckpointError, match=r"other weights of data\.train"):
            Batches(other, 2, seed=0).load_state_dict(state)


def test_a_weight_that_differs_in_its_last_digit_is_the_same() -> None:
    state = Batches(mixture((4, 1), (4, 0.1 * 3)), 2, seed=0).state_dict()
    Batches(mixture((4, 1), (4, 0.3)), 2, seed=0).load_state_dict(state)


def test_a_state_without_weights_has_no_mixture() -> None:
    state: dict[str, Any] = Batches([*mixture((4, 1))], 2, seed=0).state_dict()
    assert set(state) == {"epoch", "position", "fingerprint", "seed", "shuffle"}


def test_a_weight_too_small_for_a_task_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"weight 0.001 would have no task in an epoch of 8"):
        Batches(mixture((4, 1), (4, 0.001)), 2, seed=0)


def test_a_source_without_tasks_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no task to train on"):
        Batches(mixture((4, 1), (0, 1)), 2, seed=0)


def test_a_sampler_and_weights_exclude_each_other() -> None:
    tasks = mixture((4, 1), (4, 2))
    with pytest.raises(ConfigError, match=r"data\.sampler is set and sources of data\.train have weights"):
        SampledBatches(tasks, 2, build_sampler("uniform", {}, tasks, 0))
