"""Reseeds random generators created when a module is loaded: forked workers would all sample the same numbers."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet

_unseeded: WeakSet[random.Random] = WeakSet()
"""Generators created during `track_unseeded` without a seed."""


@contextmanager
def track_unseeded() -> Iterator[None]:
    """While a module is loaded, record `random.Random` objects created without a seed, in libraries too."""
    seed, setstate = random.Random.seed, random.Random.setstate

    def tracking_seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        seed(self, a, version)
        with suppress(TypeError):  # an unhashable subclass
            (_unseeded.add if a is None else _unseeded.discard)(self)

    def tracking_setstate(self: random.Random, state: Any) -> None:
        setstate(self, state)
        with suppress(TypeError):
            _unseeded.discard(self)

    random.Random.seed, random.Random.setstate = tracking_seed, tracking_setstate  # type: ignore[method-assign]
    try:
        yield
    finally:
        random.Random.seed, random.Random.setstate = seed, setstate  # type: ignore[method-assign]


def can_be_reseeded() -> bool:
    """False if the module holds a numpy generator: whether it was seeded cannot be determined."""
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return True
    shared = numpy.mtrand._rand._bit_generator
    return not any(issubclass(type(obj), numpy.BitGenerator) and obj is not shared for obj in gc.get_objects())


def reseed() -> None:
    """Reseed in a forked worker. Seeded generators keep their state, as in a worker that loads the module."""
    for generator in _unseeded:
        random.Random.seed(generator)
    if "numpy.random" in sys.modules:  # Python reseeds its own generator after a fork
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
