from __future__ import annotations

import gc
import weakref

from toolwise.concurrency.garbage import THRESHOLD, frozen_heap, relaxed_gc


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
    old = weakref.ref(Node())
    with frozen_heap():
        new = weakref.ref(Node())
        gc.collect()
        assert old() is not None
        assert new() is None
    gc.collect()
    assert old() is None
