"""Each in a process of its own, whose heap is small: collecting that of the tests takes seconds."""

from __future__ import annotations

import subprocess
import sys
import textwrap

SETUP = """
import gc, weakref
from toolwise.concurrency.garbage import THRESHOLD, frozen_heap, relaxed_gc

class Node:
    def __init__(self):
        self.itself = self
"""


def check(program: str) -> None:
    code = SETUP + textwrap.dedent(program)
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_collections_are_rarer_inside_and_as_before_outside() -> None:
    check("""
        before = gc.get_threshold()
        with relaxed_gc():
            assert gc.get_threshold() == (THRESHOLD, *before[1:])
        assert gc.get_threshold() == before
        for own in ((0, 10, 10), (THRESHOLD + 1, 10, 10)):  # off, or higher already
            gc.set_threshold(*own)
            with relaxed_gc():
                assert gc.get_threshold() == own
    """)


def test_the_last_of_several_restores_the_threshold() -> None:
    check("""
        before = gc.get_threshold()
        first, second = relaxed_gc(), relaxed_gc()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert gc.get_threshold()[0] == THRESHOLD
        second.__exit__(None, None, None)
        assert gc.get_threshold() == before
    """)


def test_what_a_run_began_with_is_not_scanned_and_what_it_adds_is_collected() -> None:
    check("""
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
    """)


def test_garbage_of_before_is_collected_first() -> None:
    """Such as the model of a run that failed."""
    check("""
        gc.disable()
        old = weakref.ref(Node())
        with frozen_heap():
            assert old() is None
    """)


def test_a_heap_that_is_frozen_already_stays_so() -> None:
    check("""
        gc.freeze()
        with frozen_heap():
            pass
        assert gc.get_freeze_count()
        gc.unfreeze()
        with frozen_heap():
            with frozen_heap():
                pass
            assert gc.get_freeze_count()
        assert not gc.get_freeze_count()
    """)
