from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from toolwise.concurrency.garbage import THRESHOLD, frozen_heap, relaxed_gc


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """The tests' own heap is frozen for speed (conftest.py)."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    yield
    if frozen:
        gc.freeze()


class Node:
    def __init__(self) -> None:
        self.itself = self


def test_collections_are_rarer_inside_and_as_before_outside() -> None:
    before = gc.get_threshold()
    with relaxed_gc():
        assert gc.get_threshold() == (THRESHOLD, *before[1:])
    assert gc.get_threshold() == before


def test_a_threshold_that_is_higher_or_off_stays() -> None:
    before = gc.get_threshold()
    try:
        for own in ((0, 10, 10), (THRESHOLD + 1, 10, 10)):
            gc.set_threshold(*own)
            with relaxed_gc():
                assert gc.get_threshold() == own
    finally:
        gc.set_threshold(*before)


def test_what_a_run_began_with_is_not_scanned_and_what_it_adds_is_collected() -> None:
    kept = Node()
    old = weakref.ref(kept)
    with frozen_heap():
        del kept
        new = weakref.ref(Node())
        gc.collect()
        assert old() is not None
        assert new() is None
    gc.collect()
    assert old() is None


def test_garbage_of_before_is_collected_first() -> None:
    gc.disable()
    try:
        old = weakref.ref(Node())
        with frozen_heap():
            assert old() is None
    finally:
        gc.enable()


def test_a_heap_that_is_frozen_already_stays_so() -> None:
    gc.freeze()
    try:
        with frozen_heap():
            pass
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()
    with frozen_heap():
        with frozen_heap():
            pass
        assert gc.get_freeze_count()
    assert not gc.get_freeze_count()
