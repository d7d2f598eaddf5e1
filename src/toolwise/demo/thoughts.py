"""SFT data that teaches the model that ships to write thinking levels and to call tools, and tasks for a joint budget.

    python -m toolwise.demo.thoughts runs/joint --count 24000
    toolwise sft runs/joint/teach.jsonl --model builtin:small --out runs/joint/taught

The last digit of a sum can be found by one call of the calculator or by a thought that adds number by number; a fact
that the model does not know only by a search. The level of a reply is the one that the prompt asks for, else random:
the data teaches how to think and to call, not when.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from toolwise.data.files import write_rows
from toolwise.demo.tasks import LARGEST, SMALLEST, SPLITS, make_row, make_rows
from toolwise.terminal import print_line
from toolwise.thinking.levels import ACTION, DEFAULT_LEVELS, END_ACTION, Level, Levels
from toolwise.tools.base import BaseTool
from toolwise.tools.builtin.calculator import CalculatorTool
from toolwise.tools.builtin.search.tool import SearchTool

KINDS = ("known", "lookup", "last_digit", "last_digit", "last_digit")
"""Three of five questions are about last digits."""
TAUGHT_KINDS = ("known", "known", "lookup", "last_digit", "last_digit")
"""More of what is known: memory fades when a model learns something else."""
DRILL_SHARE, DRILL_NUMBERS = 0.35, (5, 10)
OFFERS: tuple[tuple[str, ...], ...] = (("calculator", "search"), ("search",), ("calculator",), ())
_PARAMETERS = {"calculator": "expression", "search": "query"}
_THOUGHTS = {
    "known": {"state": "known.", "reflection": "it is in memory.", "candidates": "the memory is right."},
    "lookup": {"state": "a fact.", "reflection": "not in memory.", "candidates": "a guess may be wrong."},
}


def level_request(level: Level) -> str:
    """What a route with a thinking level adds to the prompt."""
    return f"Think at level {level.number} ({level.name}): {level.instruction}."


def thought_parts(row: dict[str, Any]) -> dict[str, str]:
    """The parts of a thought about a question; half of a sum belongs to the reflection, the rest to the candidates."""
    kind = row["extra_info"]["kind"]
    if kind != "last_digit":
        return {"goal": "answer.", **_THOUGHTS[kind]}
    digits = [int(digit) for digit in row["prompt"][0]["content"].removesuffix("?").split(" of ")[1].split(" + ")]
    steps = added_up(digits)
    half = len(steps) // 2
    return {
        "state": f"{len(digits)} numbers.",
        "goal": "last digit.",
        "reflection": " ".join(steps[:half]) + ".",
        "candidates": " ".join(steps[half:]) + ".",
    }


def added_up(digits: Sequence[int]) -> list[str]:
    """The last digit of the sum of all numbers so far, step by step: "7+5=2", "2+9=1", …"""
    sums = [total % 10 for total in accumulate(digits)]
    return [f"{a}+{b}={c}" for a, b, c in zip(sums, digits[1:], sums[1:], strict=False)]


def drill(rng: Random) -> dict[str, Any]:
    """Adding up alone, without a question: a small model meets too few sums in its thoughts to learn the table."""
    digits = [rng.randint(1, 9) for _ in range(rng.randint(*DRILL_NUMBERS))]
    return {
        "messages": [
            {"role": "user", "content": " + ".join(map(str, digits))},
            {"role": "assistant", "content": " ".join(added_up(digits))},
        ],
        "tools": [],
    }


def reply_at(level: Level, parts: dict[str, str], action: str) -> str:
    """A reply whose action is plain text or, added by the chat template, a call."""
    return level.write(action, parts).replace(ACTION, "").replace(END_ACTION, "")


async def demonstrate(
    row: dict[str, Any], offered: Sequence[str], level: Level, *, asked: bool, rng: Random
) -> list[dict[str, Any]]:
    """One conversation: the call that solves the question if its tool is offered, else an answer at `level`. A level
    of the reply to a result is 1: it needs no thought. What a level cannot solve is demonstrated all the same, so that
    the model answers as well as it can."""
    info, answer = row["extra_info"], str(row["reward_model"]["ground_truth"])
    messages: list[dict[str, Any]] = [{"role": "system", "content": level_request(level)}] if asked else []
    messages += row["prompt"]
    (name, text), parts = info["plan"][0], thought_parts(row)
    if name in offered and info["kind"] != "known":
        messages += await _call(name, text, info, reply_at(level, parts, ""))
        level, parts = DEFAULT_LEVELS.by_number(1), {}
    elif info["kind"] == "lookup":
        answer = str(rng.randint(SMALLEST, LARGEST))
    return [*messages, {"role": "assistant", "content": reply_at(level, parts, f"Answer: {answer}")}]


_TOOLS: dict[str, BaseTool] = {"calculator": CalculatorTool({}), "search": SearchTool({})}
_SCHEMAS = {name: tool.get_openai_tool_schema().model_dump() for name, tool in _TOOLS.items()}


async def _call(name: str, text: str, info: dict[str, Any], content: str) -> list[dict[str, Any]]:
    call = {"id": "call_0", "type": "function", "function": {"name": name, "arguments": {_PARAMETERS[name]: text}}}
    tool = _TOOLS[name]
    instance = await tool.create(**info["tools_kwargs"].get(name, {}).get("create_kwargs", {}))
    result, _, _ = await tool.execute(instance, {_PARAMETERS[name]: text})
    await tool.release(instance)
    return [
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": result},
    ]


def conversations(count: int, *, seed: int = 0, levels: Levels = DEFAULT_LEVELS) -> list[dict[str, Any]]:
    """`count` SFT conversations with their tools; three of four that are no drills are asked for a level."""
    rng = Random(f"thoughts/{seed}/{SPLITS['teach']}")

    async def make() -> list[dict[str, Any]]:
        rows = []
        for index in range(count):
            if rng.random() < DRILL_SHARE:
                rows.append(drill(rng))
                continue
            row = make_row(rng.choice(TAUGHT_KINDS), rng, index, "teach")
            offered, level, asked = rng.choice(OFFERS), rng.choice(levels.all), rng.random() < 0.75
            messages = await demonstrate(row, offered, level, asked=asked, rng=rng)
            rows.append({"messages": messages, "tools": [_SCHEMAS[name] for name in offered]})
        return rows

    return asyncio.run(make())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for teach.jsonl, train.jsonl and heldout.jsonl")
    parser.add_argument("--count", type=int, default=24_000, help="SFT conversations")
    parser.add_argument("--tasks", type=int, default=10_000, help="training tasks; a twentieth as many are held out")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    args = parser.parse_args(arguments)
    for name, rows in (
        ("teach", conversations(args.count, seed=args.seed)),
        ("train", list(make_rows(args.tasks, seed=args.seed, split="train", kinds=KINDS))),
        ("heldout", list(make_rows(args.tasks // 20, seed=args.seed, split="heldout", kinds=KINDS))),
    ):
        path = args.out / f"{name}.jsonl"
        write_rows(rows, path)
        print_line(path)


if __name__ == "__main__":
    main()
