"""SFT data for the rooms environment: walks through houses, with thoughts of every level.

    python -m toolwise.demo.rooms.demonstrations runs/rooms --count 20000
    toolwise sft runs/rooms/teach.jsonl --out runs/rooms/model

The level of each step is random, for easy and hard steps alike: the data trains the format, not when to think.
An untrained model needs `--lessons` and `--instructed` walks too.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import chain, pairwise
from pathlib import Path
from random import Random
from typing import Any, get_args

from toolwise.data.files import write_rows
from toolwise.demo.rooms.house import DEFAULT_PLAN, House, HouseConfig, RoomKind, build_house, draw_map, follow_map
from toolwise.terminal import print_line
from toolwise.thinking.levels import DEFAULT_LEVELS, Levels, load_levels

SPLITS = {"train": 0, "heldout": 1, "teach": 2}
"""Each split has its own houses: house = 3 · index + split."""


def house_number(index: int, split: str) -> int:
    return len(SPLITS) * index + SPLITS[split]


def prompt(plan: HouseConfig, levels: Levels | None = None) -> list[dict[str, str]]:
    """First message of an episode; explains the levels if given, for models that were not trained on them."""
    return [{"role": "system", "content": f"{plan.task}\n{levels.explain()}" if levels else plan.task}]


def task_rows(
    indices: Iterable[int], split: str, plan: HouseConfig = DEFAULT_PLAN, *, levels: Levels | None = None
) -> Iterator[dict[str, Any]]:
    changed = {name: value for name, value in asdict(plan).items() if value != getattr(DEFAULT_PLAN, name)}
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
    """The correct walk through a house; `step_levels` is the level of each step."""
    messages = prompt(plan, levels if explain else None)
    shown = ""
    for room, number in zip(house.rooms, step_levels, strict=True):
        messages += [
            {"role": "user", "content": f"{shown}{room.observation}"},
            {"role": "assistant", "content": levels.by_number(number).write(room.action, room.parts)},
        ]
        shown = f"{house.map_text} " if room.kind == "map" else ""
    return messages


def demonstrations(
    count: int,
    *,
    seed: int = 0,
    plan: HouseConfig = DEFAULT_PLAN,
    levels: Levels = DEFAULT_LEVELS,
    explain: bool = False,
) -> Iterator[dict[str, Any]]:
    """`count` SFT conversations, each in its own house."""
    random = Random(f"levels/{seed}")
    for index in range(count):
        house = build_house(house_number(seed * 1_000_003 + index, "teach"), plan)
        step_levels = [random.choice(levels.numbers) for _ in house.rooms]
        yield {"messages": walk(house, step_levels, plan, levels, explain=explain)}


def instructed_walks(
    count: int, *, seed: int = 0, plan: HouseConfig = DEFAULT_PLAN, levels: Levels = DEFAULT_LEVELS
) -> Iterator[dict[str, Any]]:
    """Walks of an agent that follows an instruction: a random level for each kind of room.

    Pretrained models follow instructions anyway. A model that never had to look at the room when choosing a level takes
    very long to discover that it can. Which level is worth its tokens is not given away.
    """
    random = Random(f"told/{seed}")
    for index in range(count):
        house = build_house(house_number(seed * 1_000_003 + index, "teach"), plan)
        level_by_kind = {kind: random.choice(levels.numbers) for kind in get_args(RoomKind)}
        messages = walk(house, [level_by_kind[room.kind] for room in house.rooms], plan, levels)
        rule = " ".join(f"{kind}{number}" for kind, number in level_by_kind.items())
        messages[0] = {"role": "system", "content": f"{plan.task} {rule}."}
        yield {"messages": messages}


def lessons(
    count: int, *, seed: int = 0, plan: HouseConfig = DEFAULT_PLAN, questions: int = 3
) -> Iterator[dict[str, Any]]:
    """SFT examples of reading a map, which pretrained models already can: no levels, no houses, no actions.

    A walk contains only a few map look-ups, so without these a small model takes very long to learn them.
    """
    random = Random(f"lessons/{seed}")
    for _ in range(count):
        next_mark, text = draw_map(plan.marks, random)
        messages: list[dict[str, str]] = []
        for mark in random.sample(sorted(next_mark), questions):
            marks = follow_map(next_mark, mark, plan.marks)
            prefix = f"{text} " if not messages else ""
            messages += [
                {"role": "user", "content": f"{prefix}You are at {mark}."},
                {"role": "assistant", "content": " ".join(f"{a}{b}" for a, b in pairwise(marks))},
            ]
        yield {"messages": messages}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for teach.jsonl, train.jsonl and heldout.jsonl")
    parser.add_argument("--count", type=int, default=20_000, help="SFT conversations")
    parser.add_argument("--lessons", type=int, default=0, help="extra map-reading examples, for an untrained model")
    parser.add_argument(
        "--instructed", "--told", type=int, default=0, help="extra walks with given levels (for the same)"
    )
    parser.add_argument("--tasks", type=int, default=2000, help="training tasks; half this number is held out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--levels", type=Path, help="template file to use instead of thinking/levels.toml")
    parser.add_argument("--explain", action="store_true", help="explain the levels in the system prompt")
    args = parser.parse_args(arguments)
    levels = load_levels(args.levels) if args.levels else DEFAULT_LEVELS
    explained = levels if args.explain else None
    teach = chain(
        demonstrations(args.count, seed=args.seed, levels=levels, explain=args.explain),
        lessons(args.lessons, seed=args.seed),
        instructed_walks(args.instructed, seed=args.seed, levels=levels),
    )
    for name, rows in (
        ("teach", teach),
        ("train", task_rows(range(args.tasks), "train", levels=explained)),
        ("heldout", task_rows(range(args.tasks // 2), "heldout", levels=explained)),
    ):
        path = args.out / f"{name}.jsonl"
        write_rows(list(rows), path)
        print_line(path)


if __name__ == "__main__":
    main()
