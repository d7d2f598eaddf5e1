"""The small world of the demo (places, and what they have), and questions about it as dataset rows, of several kinds:

known       the model has memorised the answer: answer directly
lookup      the answer is only in the task's documents: search
arithmetic  the numbers are too large for the model: calculate
two_step    look something up, then calculate with it
last_digit  the last digit of a sum: calculate, or think (not among `KINDS`; see demo/thoughts.py)

Questions about memorised and unknown facts use the same wording, so only the model's own memory tells whether a
question needs a tool.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from toolwise.data import files
from toolwise.routing.families import MIXED, RouteAction, Target

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
    return thing in sorted(THINGS, key=lambda t: _digest("known", place, t))[: len(THINGS) // 2]


def make_fact(place: str, thing: str, rng: Random) -> Fact:
    """The fixed fact if it is known; otherwise a random one for each task."""
    if is_known(place, thing):
        return Fact(place, thing, SMALLEST + _digest("value", place, thing) % (LARGEST - SMALLEST))
    return Fact(place, thing, rng.randint(SMALLEST, LARGEST))


@dataclass(frozen=True, slots=True)
class Calculation:
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


KINDS = ["known", "lookup", "arithmetic", "two_step"]
ORACLE_ROUTES: dict[str, Target] = {
    "known": RouteAction.ANSWER,
    "lookup": RouteAction.SEARCH_FAMILY,
    "arithmetic": RouteAction.CALCULATE_FAMILY,
    "two_step": MIXED,
    "last_digit": MIXED,
}
"""The best route for each kind of question, for the "oracle labels" baseline of a frontier."""
DIGITS = (3, 7)
"""Numbers to add in a question about a last digit, at least and at most."""
SPLITS = {"train": 1, "heldout": 2, "teach": 3}
"""Each split has its own random seed, so splits share no task."""


def make_row(kind: str, rng: Random, index: int, split: str) -> dict[str, Any]:
    makers = {"known": _known, "lookup": _lookup, "arithmetic": _arithmetic, "two_step": _two_step}
    makers["last_digit"] = _last_digit
    question, answer, about, plan = makers[kind](rng)
    return {
        "data_source": "toolwise/small-world",
        "prompt": [{"role": "user", "content": question}],
        "ability": "tool_use",
        "reward_model": {"style": "rule", "ground_truth": str(answer)},
        "tools": ["calculator", "search"],
        "extra_info": {
            "index": index,
            "split": split,
            "kind": kind,
            "oracle_route": str(ORACLE_ROUTES[kind]),
            "plan": plan,
            "need_tools_kwargs": True,
            "tools_kwargs": {"search": {"create_kwargs": {"documents": _documents(about, rng)}}},
        },
    }


def make_rows(count: int, *, seed: int, split: str, kinds: Sequence[str] = KINDS) -> Iterator[dict[str, Any]]:
    """`count` tasks, each of a kind chosen at random."""
    rng = Random(f"{seed}/{SPLITS[split]}")
    for index in range(count):
        yield make_row(rng.choice(kinds), rng, index, split)


def write_rows(path: Path, count: int, *, seed: int, split: str, kinds: Sequence[str] = KINDS) -> Path:
    files.write_rows(list(make_rows(count, seed=seed, split=split, kinds=kinds)), path)
    return path


# Question, answer, the facts it is about, and the calls that solve it. The calls are only for the teacher
# (scripts/small_world_teacher.py); neither the agent nor its reward sees them.
_Question = tuple[str, int, list[Fact], list[list[str]]]


def _search(subject: Fact) -> list[str]:
    return ["search", f"{subject.place} {subject.thing}"]


def _known(rng: Random) -> _Question:
    if rng.random() < 0.5:
        return _from_calculation(rng.choice(KNOWN_CALCULATIONS))
    return _from_fact(_random_fact(rng, known=True))


def _lookup(rng: Random) -> _Question:
    return _from_fact(_random_fact(rng, known=False))


def _arithmetic(rng: Random) -> _Question:
    return _from_calculation(random_calculation(rng))


def _from_fact(subject: Fact) -> _Question:
    return f"How many {subject.thing} does {subject.place} have?", subject.value, [subject], [_search(subject)]


def _from_calculation(calculation: Calculation) -> _Question:
    return f"What is {calculation.expression}?", calculation.value, [], [["calculator", calculation.expression]]


def _two_step(rng: Random) -> _Question:
    first = _random_fact(rng, known=False)
    if rng.random() < 0.5:
        more = rng.randint(SMALLEST, LARGEST)
        total = Calculation(first.value, "+", more)
        question = f"How many {first.thing} would {first.place} have with {more} more?"
        return question, total.value, [first], [_search(first), ["calculator", total.expression]]
    other = rng.choice([p for p in PLACES if p != first.place and not is_known(p, first.thing)])
    second = make_fact(other, first.thing, rng)
    total = Calculation(first.value, "+", second.value)
    question = f"How many {first.thing} do {first.place} and {second.place} have together?"
    calls = [_search(first), _search(second), ["calculator", total.expression]]
    return question, total.value, [first, second], calls


def _last_digit(rng: Random) -> _Question:
    digits = [rng.randint(1, 9) for _ in range(rng.randint(*DIGITS))]
    total = " + ".join(map(str, digits))
    return f"What is the last digit of {total}?", sum(digits) % 10, [], [["calculator", f"({total}) % 10"]]


def _random_fact(rng: Random, *, known: bool) -> Fact:
    while True:
        place, thing = rng.choice(PLACES), rng.choice(THINGS)
        if is_known(place, thing) == known:
            return make_fact(place, thing, rng)


def _documents(about: list[Fact], rng: Random, count: int = 6) -> list[str]:
    """Searchable documents: the facts in question, among other facts about the same and other places."""
    chosen = {(f.place, f.thing): f for f in about}
    near = [f.place for f in about] or [rng.choice(PLACES)]
    while len(chosen) < count:
        place = rng.choice(near) if rng.random() < 0.4 else rng.choice(PLACES)
        thing = rng.choice(THINGS)
        chosen.setdefault((place, thing), make_fact(place, thing, rng))
    documents = [f.sentence() for f in chosen.values()]
    rng.shuffle(documents)
    return documents
