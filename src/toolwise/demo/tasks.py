"""Questions about the small world as dataset rows, of four kinds:

known       the model has memorised the answer: answer directly
lookup      the answer is only in the task's documents: search
arithmetic  the numbers are too large for the model: calculate
two_step    look something up, then calculate with it
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from toolwise.data import files
from toolwise.demo.world import (
    KNOWN_CALCULATIONS,
    LARGEST,
    PLACES,
    SMALLEST,
    THINGS,
    Calculation,
    Fact,
    is_known,
    make_fact,
    random_calculation,
)
from toolwise.routing.actions import MIXED, RouteAction, Target

KINDS = ["known", "lookup", "arithmetic", "two_step"]
ORACLE_ROUTES: dict[str, Target] = {
    "known": RouteAction.ANSWER,
    "lookup": RouteAction.SEARCH_FAMILY,
    "arithmetic": RouteAction.CALCULATE_FAMILY,
    "two_step": MIXED,
}
"""The best route for each kind of question, for the "oracle labels" baseline of a frontier."""
SPLITS = {"train": 1, "heldout": 2, "teach": 3}
"""Each split has its own random seed, so splits share no task."""


def make_row(kind: str, rng: Random, index: int, split: str) -> dict[str, Any]:
    """One task as a dataset row."""
    makers = {"known": _known, "lookup": _lookup, "arithmetic": _arithmetic, "two_step": _two_step}
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
