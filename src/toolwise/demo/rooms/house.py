"""One house: its rooms in order, and the map needed in its halls.

In most rooms the right action is visible: an open door, a key, a lock and its key. In a hall the agent stands at a mark
and must take the door `hops` marks further along the map, which it saw once, rooms ago: "37" leads from 3 to 7, and the
arrows are shuffled. Following them takes one look-up after another: easy to write down, hard to do in one pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, pairwise
from random import Random
from typing import Literal

RoomKind = Literal["map", "door", "key", "lock", "hall"]

SIDES = ("left", "right", "up", "down")
COLOURS = ("red", "blue", "green", "white")
NUMBER_WORDS = {3: "three", 4: "four", 5: "five", 6: "six"}


@dataclass(frozen=True, slots=True)
class Room:
    """One room: what the agent sees, and the one action that leads on."""

    kind: RoomKind
    observation: str
    action: str
    parts: Mapping[str, str]
    """Content of a thought in this room: state, goal, reflection and candidates, for `Level.write`."""

    @property
    def hard(self) -> bool:
        return self.kind == "hall"


@dataclass(frozen=True, slots=True)
class House:
    rooms: tuple[Room, ...]
    map_text: str


@dataclass(frozen=True, slots=True)
class HouseConfig:
    halls: int = 2
    doors: int = 1
    locks: int = 1
    marks: int = 8
    """Marks on the map, one of which is the right door."""
    hops: int = 4
    """Distance to the right door along the map."""

    def __post_init__(self) -> None:
        if not 2 <= self.hops < self.marks <= 9 or self.hops not in NUMBER_WORDS:
            raise ValueError(f"hops must be 3 to 6 and less than marks, marks at most 9; got {self.hops}, {self.marks}")
        if min(self.halls, self.doors, self.locks) < 0:
            raise ValueError("halls, doors and locks must not be negative")

    @property
    def task(self) -> str:
        """Instruction in the agent's prompt."""
        return f"Get out. In a hall take the door {NUMBER_WORDS[self.hops]} on."


DEFAULT_PLAN = HouseConfig()


def build_house(seed: int, plan: HouseConfig = DEFAULT_PLAN) -> House:
    """Build the house of a seed; deterministic."""
    random = Random(f"house/{seed}")
    next_mark, map_text = draw_map(plan.marks, random)
    starts = random.sample(range(1, plan.marks + 1), min(plan.halls, plan.marks))
    parts: list[list[Room]] = [[_hall(start, next_mark, plan.hops)] for start in starts]
    parts += [[_door(random.choice(SIDES))] for _ in range(plan.doors)]
    parts += [_locked(random.choice(COLOURS), random) for _ in range(plan.locks)]
    random.shuffle(parts)
    return House((_map(), *chain.from_iterable(parts)), map_text)


def draw_map(marks: int, random: Random) -> tuple[dict[int, int], str]:
    """A random cycle through all marks: the next mark of each, and the map as text."""
    order = random.sample(range(1, marks + 1), marks)
    next_mark = {mark: order[(i + 1) % marks] for i, mark in enumerate(order)}
    arrows = random.sample(sorted(next_mark), marks)
    return next_mark, "Map: " + " ".join(f"{mark}{next_mark[mark]}" for mark in arrows) + "."


def follow_map(next_mark: Mapping[int, int], start: int, hops: int) -> list[int]:
    """The marks passed, including the first and the last."""
    marks = [start]
    for _ in range(hops):
        marks.append(next_mark[marks[-1]])
    return marks


def _map() -> Room:
    return Room(
        kind="map",
        observation="A map is here.",
        action="take map",
        parts={
            "state": "map here.",
            "goal": "out.",
            "reflection": "need it.",
            "candidates": "take map is right.",
        },
    )


def _door(side: str) -> Room:
    return Room(
        kind="door",
        observation=f"The {side} door is open.",
        action=f"go {side}",
        parts={
            "state": f"{side} open.",
            "goal": "out.",
            "reflection": "it is free.",
            "candidates": f"go {side} is right.",
        },
    )


def _locked(colour: str, random: Random) -> list[Room]:
    """A room with the right key and a wrong one, followed by the locked door."""
    other = random.choice([c for c in COLOURS if c != colour])
    keys = random.sample([colour, other], 2)
    return [
        Room(
            kind="key",
            observation=f"The door has a {colour} lock. Here are a {keys[0]} key and a {keys[1]} key.",
            action=f"take {colour} key",
            parts={
                "state": f"{colour} lock.",
                "goal": "out.",
                "reflection": "need its key.",
                "candidates": f"take {other} key is wrong. take {colour} key is right.",
            },
        ),
        Room(
            kind="lock",
            observation=f"You have the {colour} key. The door is shut.",
            action=f"use {colour} key",
            parts={
                "state": f"have {colour} key.",
                "goal": "out.",
                "reflection": "it fits.",
                "candidates": f"use {colour} key is right.",
            },
        ),
    ]


def _hall(start: int, next_mark: Mapping[int, int], hops: int) -> Room:
    """A thought follows the map as far as its level goes: not at all for the state, half-way for the reflection, to the
    end for the candidates."""
    marks = follow_map(next_mark, start, hops)
    arrows = [f"{a}{b}" for a, b in pairwise(marks)]
    half = hops // 2
    return Room(
        kind="hall",
        observation=f"A hall. You are at {start}.",
        action=str(marks[-1]),
        parts={
            "state": f"at {start}.",
            "goal": "out.",
            "reflection": " ".join(arrows[:half]) + ".",
            "candidates": " ".join(arrows[half:]) + f" so {marks[-1]} is right.",
        },
    )
