"""Batches: seeded, endless, and resumable at the exact position."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolwise.data import Batches
from toolwise.errors import CheckpointError, ConfigError
from toolwise.messages import Message
from toolwise.types import Task


def make_tasks(n: int, prefix: str = "t") -> list[Task]:
    return [Task(task_id=f"{prefix}{i}", prompt=[Message(role="user", content=str(i))]) for i in range(n)]


def ids(batches: Batches, n: int) -> list[list[str]]:
    return [[task.task_id for task in batch] for batch in islice(batches, n)]


sizes = st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


@settings(deadline=None)
@given(size=sizes, seed=st.integers(0, 2**40), shuffle=st.booleans(), drop_last=st.booleans())
def test_an_epoch_holds_each_task_once(size: tuple[int, int], seed: int, shuffle: bool, drop_last: bool) -> None:
    n, batch_size = size
    batches = Batches(make_tasks(n), batch_size, seed=seed, shuffle=shuffle, drop_last=drop_last)
    for epoch in range(3):
        seen = [task_id for batch in ids(batches, batches.batches_per_epoch) for task_id in batch]
        assert batches.epoch == epoch
        assert len(seen) == len(set(seen)) == (n - n % batch_size if drop_last else n)


@settings(deadline=None)
@given(
    size=sizes,
    seed=st.integers(0, 99),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    before=st.integers(0, 30),
    after=st.integers(0, 30),
)
def test_a_state_round_trip_at_any_point_changes_nothing(
    size: tuple[int, int], seed: int, shuffle: bool, drop_last: bool, before: int, after: int
) -> None:
    n, batch_size = size

    def fresh() -> Batches:
        return Batches(make_tasks(n), batch_size, seed=seed, shuffle=shuffle, drop_last=drop_last)

    whole = ids(fresh(), before + after)
    first, second = fresh(), fresh()
    start = ids(first, before)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.state_dict() == first.state_dict()
    assert start + ids(second, after) == whole


def test_epochs_are_permuted_afresh() -> None:
    batches = Batches(make_tasks(50), 50, seed=0)
    (first,), (second,) = ids(batches, 1), ids(batches, 1)
    assert sorted(first) == sorted(second)
    assert first != second


def test_the_seed_decides_the_order() -> None:
    tasks = make_tasks(50)
    assert ids(Batches(tasks, 5, seed=1), 20) == ids(Batches(tasks, 5, seed=1), 20)
    assert ids(Batches(tasks, 5, seed=1), 20) != ids(Batches(tasks, 5, seed=2), 20)


def test_without_shuffling_the_order_is_the_files() -> None:
    batches = Batches(make_tasks(5), 2, seed=0, shuffle=False)
    assert ids(batches, 3) == [["t0", "t1"], ["t2", "t3"], ["t0", "t1"]]


def test_without_drop_last_the_last_batch_is_short_and_stays_in_its_epoch() -> None:
    batches = Batches(make_tasks(5), 2, seed=0, shuffle=False, drop_last=False)
    assert ids(batches, 4) == [["t0", "t1"], ["t2", "t3"], ["t4"], ["t0", "t1"]]


def test_another_batch_size_goes_on_at_the_same_task() -> None:
    first = Batches(make_tasks(6), 2, seed=0, shuffle=False)
    next(first)
    second = Batches(make_tasks(6), 3, seed=0, shuffle=False)
    second.load_state_dict(first.state_dict())
    assert ids(second, 2) == [["t2", "t3", "t4"], ["t0", "t1", "t2"]]


def test_a_batch_larger_than_the_data_says_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"batch_size 8 is more than the 3 tasks"):
        Batches(make_tasks(3), 8, seed=0)
    assert ids(Batches(make_tasks(3), 8, seed=0, shuffle=False, drop_last=False), 1) == [["t0", "t1", "t2"]]


@pytest.mark.parametrize(("n", "batch_size", "seed"), [(0, 1, 0), (3, 0, 0), (3, 1, -1)])
def test_arguments_that_make_no_batches_are_refused(n: int, batch_size: int, seed: int) -> None:
    with pytest.raises(ConfigError):
        Batches(make_tasks(n), batch_size, seed=seed)


@pytest.mark.parametrize("other", [make_tasks(6, prefix="u"), make_tasks(7), make_tasks(6)[::-1]])
def test_resuming_on_other_data_is_refused(other: list[Task]) -> None:
    state = Batches(make_tasks(6), 2, seed=0).state_dict()
    with pytest.raises(CheckpointError, match="other data"):
        Batches(other, 2, seed=0).load_state_dict(state)


@pytest.mark.parametrize(("seed", "shuffle", "name"), [(1, True, "seed"), (0, False, "shuffle")])
def test_resuming_in_another_order_is_refused(seed: int, shuffle: bool, name: str) -> None:
    state = Batches(make_tasks(6), 2, seed=0).state_dict()
    with pytest.raises(CheckpointError, match=f"resume with {name} ="):
        Batches(make_tasks(6), 2, seed=seed, shuffle=shuffle).load_state_dict(state)


@pytest.mark.parametrize(
    "torn",
    [{"epoch": -1}, {"epoch": None}, {"position": 7}, {"position": -1}, {"position": 1.5}, {"epoch": True}],
)
def test_a_torn_state_is_refused_and_changes_nothing(torn: dict[str, Any]) -> None:
    batches = Batches(make_tasks(6), 2, seed=0)
    next(batches)
    before = batches.state_dict()
    with pytest.raises(CheckpointError, match="damaged"):
        batches.load_state_dict(before | torn)
    assert batches.state_dict() == before


def test_upcoming_tasks_are_those_of_the_next_batch() -> None:
    batches = Batches(make_tasks(7), 3, seed=1)
    next(batches)
    upcoming = [task.task_id for task in batches.upcoming()]
    assert upcoming == [task.task_id for task in batches.upcoming()] == ids(batches, 1)[0]


def test_nothing_is_upcoming_at_the_end_of_an_epoch() -> None:
    batches = Batches(make_tasks(7), 3, seed=1)
    ids(batches, 2)
    assert list(batches.upcoming()) == []  # one task is left over
    assert len(next(batches)) == batches.next_size == 3
