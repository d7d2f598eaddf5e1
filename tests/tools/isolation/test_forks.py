"""Random numbers in workers forked from one process."""

from __future__ import annotations

import asyncio
import copy
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolwise.tools.isolation import forks
from toolwise.tools.isolation.code_location import ModuleRef, ObjectRef
from toolwise.tools.isolation.tool_pool import ToolPool

TOOLS = """
import os, random, time
{top}
def roll() -> list[str]:
    open(f"{folder}/{{os.getpid()}}", "w").close()
    end = time.monotonic() + 20
    while len(os.listdir("{folder}")) < 3 and time.monotonic() < end:  # so that each call has a worker of its own
        time.sleep(0.01)
    above_supervisor = open(f"/proc/{{os.getppid()}}/stat").read().rpartition(")")[2].split()[1]
    return [above_supervisor, *(str(generator.random()) for generator in GENERATORS)]
"""


@pytest.fixture
def pool() -> Iterator[ToolPool]:
    made = ToolPool(limit=4)
    yield made
    made.close()


def rolls(pool: ToolPool, tmp_path: Path, top: str) -> list[list[str]]:
    """The results of three concurrent calls in separate workers: the worker's parent, and a number per generator."""
    workers = tmp_path / "workers"
    workers.mkdir()
    (tmp_path / "dice.py").write_text(TOOLS.format(top=top, folder=workers))
    target = ObjectRef(ModuleRef(None, str(tmp_path / "dice.py")), "roll")

    async def three() -> list[list[str]]:
        results = await asyncio.gather(*(pool.run(target, {}) for _ in range(3)))
        return [text.strip("[]").replace('"', "").split(", ") for text, _, _ in results]

    return asyncio.run(three())


def test_each_worker_draws_its_own_numbers_unless_the_module_gave_a_seed(pool: ToolPool, tmp_path: Path) -> None:
    top = "GENERATORS = random.Random(), random, random.Random(7)"
    parents, own, librarys, seeded = map(set, zip(*rolls(pool, tmp_path, top), strict=True))
    assert len(own) == len(librarys) == 3
    assert seeded == {str(random.Random(7).random())}
    if os.path.exists("/proc/self/task"):
        assert len(parents) == 1
        assert parents != {str(os.getpid())}  # and they still share their memory


@pytest.mark.long
@pytest.mark.parametrize("made", ["default_rng()", "RandomState()"])
def test_a_module_that_keeps_a_generator_of_numpys_is_loaded_by_each_worker(
    pool: ToolPool, tmp_path: Path, made: str
) -> None:
    top = f"import numpy\nGENERATORS = [numpy.random.{made}]"
    parents, own = map(set, zip(*rolls(pool, tmp_path, top), strict=True))
    assert len(own) == 3
    assert parents == {str(os.getpid())}


def test_numpys_own_generator_is_seeded_anew(pool: ToolPool, tmp_path: Path) -> None:
    _, own = map(set, zip(*rolls(pool, tmp_path, "import numpy\nGENERATORS = [numpy.random]"), strict=True))
    assert len(own) == 3
    assert not pool._roster.unshared_modules


def test_only_generators_without_a_seed_are_seeded_anew() -> None:
    class Odd(random.Random):
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            return self is other

    class Strict(random.Random):
        def seed(self, text: str) -> None:  # type: ignore[override]
            super().seed(None if text == "any" else text)

    methods = random.Random.seed, random.Random.setstate
    with forks.track_unseeded():
        fresh, strict = random.Random(), Strict("any")
        seeded = [random.Random(7), Strict("seven"), copy.copy(random.Random(7))]
        later = random.Random()
        later.seed(7)
        Odd()
    assert (random.Random.seed, random.Random.setstate) == methods
    drawn = [fresh, strict, *seeded, later]
    states = [generator.getstate() for generator in drawn]
    forks.reseed()
    kept = [generator.getstate() == state for generator, state in zip(drawn, states, strict=True)]
    assert kept == [False, False, True, True, True, True]
