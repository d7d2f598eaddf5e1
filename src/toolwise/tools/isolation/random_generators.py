"""Random generators that a module makes when it is loaded: forked workers would all draw the same numbers from them."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet

_unseeded: WeakSet[random.Random] = WeakSet()
"""Made during `track_unseeded` and never given a seed, as far as this process knows."""


@contextmanager
def track_unseeded() -> Iterator[None]:
    """Around the loading of a module: takes note of generators of Python's that get no seed, those of libraries too."""
    seed, setstate = random.Random.seed, random.Random.setstate

    def noted_seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        seed(self, a, version)
        with suppress(TypeError):  # a class of the module's own that has no hash
            (_unseeded.add if a is None else _unseeded.discard)(self)

    def noted_setstate(self: random.Random, state: Any) -> None:
        setstate(self, state)
        with suppress(TypeError):
            _unseeded.discard(self)

    random.Random.seed, random.Random.setstate = noted_seed, noted_setstate  # type: ignore[method-assign]
    try:
        yield
    finally:
        random.Random.seed, random.Random.setstate = seed, setstate  # type: ignore[method-assign]


def can_be_reseeded() -> bool:
    """False where the module keeps a generator of numpy's: whether it has a seed cannot be told."""
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return True
    shared = numpy.mtrand._rand._bit_generator
    return not any(issubclass(type(kept), numpy.BitGenerator) and kept is not shared for kept in gc.get_objects())


def reseed() -> None:
    """In a forked worker. A generator that was given a seed keeps it, as it would in a worker that loads the module."""
    for generator in _unseeded:
        random.Random.seed(generator)
    if "numpy.random" in sys.modules:  # Python seeds its own generator after a fork
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
