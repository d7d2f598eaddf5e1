"""What a model is taught before it learns: walks through houses, with thoughts of every level.

    python -m toolwise.demo.rooms.demonstrations runs/rooms --count 20000
    toolwise sft runs/rooms/teach.jsonl --out runs/rooms/taught

The level of each step is drawn at random, easy or hard alike: the format is taught, and nothing about when to think.
A fresh model needs `--lessons` and `--told` walks beside them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from random import Random
from typing import Any, get_args

from toolwise.demo.rooms.house import House, HouseConfig, RoomKind, build_house, draw_map, follow_map
from toolwise.serialization.json_text import json_text
from toolwise.terminal import print_line
from toolwise.thinking.levels import DEFAULT_LEVELS, Levels, load_levels

SPLITS = {"train": 0, "heldout": 1, "teach": 2}
"""Each split has houses of its own: house = 3 · index + split."""


def house_number(index: int, split: str) -> int:
    return len(SPLITS) * index + SPLITS[split]


def prompt(plan: HouseConfig, levels: Levels | None = None) -> list[dict[str, str]]:
    """How an episode begins. A model that knows no levels is told of them; one that was taught them need not be."""
    told = f"{plan.task}\n{levels.explain()}" if levels else plan.task
    return [{"role": "system", "content": told}]


def task_rows(
    indices: Iterable[int], split: str, plan: HouseConfig | None = None, *, levels: Levels | None = None
) -> Iterator[dict[str, Any]]:
    """Tasks as dataset rows, one a house."""
    plan = plan or HouseConfig()
    changed = {name: value for name, value in _fields(plan).items() if value != _fields(HouseConfig())[name]}
    for index in indices:
        number = house_number(index, split)
        kwargs: dict[str, Any] = {"house": number} | ({"plan": changed} if changed else {})
        yield {
            "task_id": f"house-{number}",
            "prompt": prompt(plan, levels),
            "data_source": "toolwise/rooms",
            "extra_info": {"env_kwargs": kwargs},
        }


def walk(
    house: House,
    step_levels: Sequence[int],
    plan: HouseConfig,
    levels: Levels = DEFAULT_LEVELS,
    *,
    explain: bool = False,
) -> list[dict[str, str]]:
    """The right way through a house, `step_levels` the level of each of its steps."""
    messages = prompt(plan, levels if explain else None)
    shown = ""
    for room, number in zip(house.rooms, step_levels, strict=True):
        messages.append({"role": "user", "content": f"{shown}{room.observation}"})
        reply = levels.by_number(number).write(room.action, room.parts)
        messages.append({"role": "assistant", "content": reply})
        shown = f"{house.map_text} " if room.kind == "map" else ""
    return messages


def demonstrations(
    count: int,
    *,
    seed: int = 0,
    plan: HouseConfig | None = None,
    levels: Levels = DEFAULT_LEVELS,
    explain: bool = False,
) -> Iterator[dict[str, Any]]:
    """`count` conversations to teach on, each in a house of its own."""
    plan = plan or HouseConfig()
    random = Random(f"levels/{seed}")
    for index in range(count):
        house = build_house(house_number(seed * 1_000_003 + index, "teach"), plan)
        step_levels = [random.choice(levels.numbers) for _ in house.rooms]
        yield {"messages": walk(house, step_levels, plan, levels, explain=explain)}


def instructed_walks(
    count: int, *, seed: int = 0, plan: HouseConfig | None = None, levels: Levels = DEFAULT_LEVELS
) -> Iterator[dict[str, Any]]:
    """Walks of an agent that is told which level to use at which kind of place, and does; the levels are drawn at
    random for each walk. Any grown model does as it is told. One that never had to look at the place when it chose a
    level takes very long to find out that it may; which level is worth its tokens, nobody tells it.
    """
    plan = plan or HouseConfig()
    random = Random(f"told/{seed}")
    for index in range(count):
        house = build_house(house_number(seed * 1_000_003 + index, "teach"), plan)
        at = {kind: random.choice(levels.numbers) for kind in get_args(RoomKind)}
        messages = walk(house, [at[room.kind] for room in house.rooms], plan, levels)
        rule = " ".join(f"{kind}{number}" for kind, number in at.items())
        messages[0] = {"role": "system", "content": f"{plan.task} {rule}."}
        yield {"messages": messages}


def lessons(
    count: int, *, seed: int = 0, plan: HouseConfig | None = None, questions: int = 3
) -> Iterator[dict[str, Any]]:
    """Conversations that teach a fresh model to read a map, as any grown model can: no levels, no houses, no actions.

    Without them the look-ups of a hall, a few in a long walk, take a small model very long to discover.
    """
    plan = plan or HouseConfig()
    random = Random(f"lessons/{seed}")
    for _ in range(count):
        next_mark, text = draw_map(plan.marks, random)
        messages: list[dict[str, str]] = []
        for mark in random.sample(sorted(next_mark), questions):
            marks = follow_map(next_mark, mark, plan.marks)
            told = f"{text} " if not messages else ""
            messages.append({"role": "user", "content": f"{told}You are at {mark}."})
            messages.append({"role": "assistant", "content": " ".join(f"{a}{b}" for a, b in pairwise(marks))})
        yield {"messages": messages}


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json_text(row) + "\n" for row in rows)
    return path


def _fields(plan: HouseConfig) -> dict[str, int]:
    return {name: getattr(plan, name) for name in ("halls", "doors", "locks", "marks", "hops")}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for teach.jsonl, train.jsonl and heldout.jsonl")
    parser.add_argument("--count", type=int, default=20_000, help="conversations to teach on")
    parser.add_argument(
        "--lessons", type=int, default=0, help="lessons in reading a map beside them, for a fresh model"
    )
    parser.add_argument("--told", type=int, default=0, help="walks whose agent is told its levels, for a fresh model")
    parser.add_argument("--tasks", type=int, default=2000, help="tasks to train on; half as many are held out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--levels", type=Path, help="a template file of your own in place of thinking/levels.toml")
    parser.add_argument("--explain", action="store_true", help="explain the levels in the system prompt")
    args = parser.parse_args(arguments)
    levels = load_levels(args.levels) if args.levels else DEFAULT_LEVELS
    told = levels if args.explain else None
    teach = demonstrations(args.count, seed=args.seed, levels=levels, explain=args.explain)
    told_too = instructed_walks(args.told, seed=args.seed, levels=levels)
    for name, rows in (
        ("teach", chain(teach, lessons(args.lessons, seed=args.seed), told_too)),
        ("train", task_rows(range(args.tasks), "train", levels=told)),
        ("heldout", task_rows(range(args.tasks // 2), "heldout", levels=told)),
    ):
        print_line(write_rows(args.out / f"{name}.jsonl", rows))


if __name__ == "__main__":
    main()
