"""The small world of the demo: places, what they have, and which facts the shipped model has memorised.

Questions about memorised and unknown facts use the same wording, so only the model's own memory tells whether a
question needs a tool.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

PLACES = [
    "Alder",
    "Brenna",
    "Corvin",
    "Dalmar",
    "Elowen",
    "Farrow",
    "Gorrin",
    "Hadley",
    "Istra",
    "Jorvik",
    "Kelda",
    "Lorne",
    "Maren",
    "Norvale",
    "Orsa",
    "Pellin",
    "Quillon",
    "Ravenna",
    "Selby",
    "Torvald",
    "Ulmar",
    "Velora",
    "Wexley",
    "Yarrow",
    "Zennor",
    "Ashby",
    "Belmont",
    "Calder",
    "Dorwin",
    "Esker",
    "Fenwick",
    "Garrow",
    "Harlow",
    "Ilmar",
    "Juniper",
    "Kestrel",
    "Larkin",
    "Morrow",
    "Nettle",
    "Osprey",
    "Perrin",
    "Quarry",
    "Rowan",
    "Sorrel",
    "Tamin",
    "Umber",
    "Vesper",
    "Willow",
]
THINGS = ["bridges", "towers", "mills", "wells"]
SMALLEST, LARGEST = 12, 989
_OPERATORS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@dataclass(frozen=True, slots=True)
class Fact:
    """How many of a thing a place has."""

    place: str
    thing: str
    value: int

    def sentence(self) -> str:
        return f"{self.place} has {self.value} {self.thing}."


def _digest(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256("|".join(map(str, parts)).encode()).digest()[:8], "big")


def is_known(place: str, thing: str) -> bool:
    """Half of the facts are the same in every task and were part of the model's SFT data."""
    things_by_rank = sorted(THINGS, key=lambda t: _digest("known", place, t))
    return thing in things_by_rank[: len(THINGS) // 2]


def make_fact(place: str, thing: str, rng: Random) -> Fact:
    """The fixed fact if it is known; otherwise a random one for each task."""
    if is_known(place, thing):
        return Fact(place, thing, SMALLEST + _digest("value", place, thing) % (LARGEST - SMALLEST))
    return Fact(place, thing, rng.randint(SMALLEST, LARGEST))


@dataclass(frozen=True, slots=True)
class Calculation:
    """One arithmetic problem."""

    left: int
    operator: str
    right: int

    @property
    def expression(self) -> str:
        return f"{self.left} {self.operator} {self.right}"

    @property
    def value(self) -> int:
        return _OPERATORS[self.operator](self.left, self.right)


SMALL_CALCULATIONS = [
    Calculation(a, op, b) for a in range(1, 13) for b in range(1, 13) for op in "+-*" if op != "-" or a >= b
]
KNOWN_CALCULATIONS = [s for s in SMALL_CALCULATIONS if _digest("sum", s.expression) % 2 == 0]


def random_calculation(rng: Random) -> Calculation:
    """1- to 4-digit arithmetic, never one of the memorised problems."""
    while True:
        sign = rng.choice("+-*")
        longest = 3 if sign == "*" else 4
        left, right = (rng.randint(1, 10 ** rng.randint(1, longest) - 1) for _ in range(2))
        if sign == "-" and left < right:
            left, right = right, left
        calculation = Calculation(left, sign, right)
        if calculation not in _KNOWN:
            return calculation


_KNOWN = frozenset(KNOWN_CALCULATIONS)
