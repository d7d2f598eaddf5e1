"""The forced-level table: how often a model acts correctly in the rooms environment when its level is forced.

    python scripts/thinking_table.py runs/rooms/taught --houses 200

Uses held-out houses. The history of each step is the correct path so far with random levels, the same for all four
levels; then the level is forced, the model writes thought and action, and the action is checked.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(OMP_WAIT_POLICY="PASSIVE", TOKENIZERS_PARALLELISM="false")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src")]

WANTED = {("1", "easy"): (0.95, 1.0), ("1", "hard"): (0.0, 0.5), ("4", "hard"): (0.9, 1.0)}
"""Bounds on success under which thinking counts as causal: (level, kind of step) -> (low, high)."""


@dataclass(frozen=True)
class Question:
    """One step of one walk: its history and the correct action."""

    history: list[dict[str, str]]
    action: str
    kind: str


def questions(houses: int, plan: Any, levels: Any, seed: int) -> list[Question]:
    """Every step of the held-out houses, after a correct history."""
    from toolwise.demo.rooms.demonstrations import house_number, walk
    from toolwise.demo.rooms.house import build_house

    random = Random(f"table/{seed}")
    found = []
    for index in range(houses):
        house = build_house(house_number(index, "heldout"), plan)
        said = walk(house, [random.choice(levels.numbers) for _ in house.rooms], plan, levels)
        for step, room in enumerate(house.rooms):
            found.append(Question(said[: 2 * step + 2], room.action, "hard" if room.hard else "easy"))
    return found


def forced_table(
    model_path: str,
    *,
    houses: int = 200,
    temperature: float = 1.0,
    seed: int = 0,
    batch: int = 128,
    plan: dict[str, int] | None = None,
) -> dict[str, Any]:
    """Per level and kind of step: success with its standard error, thinking tokens, format validity."""
    import torch

    from toolwise.demo.rooms.house import HouseConfig
    from toolwise.messages import Message
    from toolwise.models import load_model
    from toolwise.policies.transformers_generation import generate_batch
    from toolwise.protocols import Sampling
    from toolwise.thinking.levels import DEFAULT_LEVELS
    from toolwise.thinking.parsed_step import token_spans
    from toolwise.thinking.reply import parse_reply

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model, chat = load_model(model_path)
    asked = sorted(questions(houses, HouseConfig(**(plan or {})), DEFAULT_LEVELS, seed), key=lambda q: len(q.history))
    starts = [chat.start([Message.model_validate(m) for m in q.history]) for q in asked]
    cells: dict[tuple[int, str], list[tuple[bool, int, bool]]] = defaultdict(list)
    for level in DEFAULT_LEVELS:
        opening = chat.tokenizer.encode(level.opening, add_special_tokens=False)
        for first in range(0, len(asked), batch):
            part = range(first, min(first + batch, len(asked)))
            samplings = [
                Sampling(temperature, 64, temperature > 0, seed * 7919 + i, stop_token_ids=(chat.end_id,)) for i in part
            ]
            prompts = [[*starts[i], *opening] for i in part]
            said = generate_batch(model, prompts, samplings, pad_id=chat.pad_id, policy_version=0)
            for i, generation in zip(part, said, strict=True):
                ids = [*opening, *generation.token_ids]
                reading = parse_reply(chat.decode(ids))
                tokens = len(token_spans(ids, chat.decode, reading).thought)
                cells[level.number, asked[i].kind].append((reading.action == asked[i].action, tokens, reading.valid))
    return {
        "model": model_path,
        "houses": houses,
        "temperature": temperature,
        "cells": {f"{level}/{kind}": _cell(cell) for (level, kind), cell in sorted(cells.items())},
    }


def _cell(cell: list[tuple[bool, int, bool]]) -> dict[str, float]:
    share = sum(right for right, _, _ in cell) / len(cell)
    return {
        "steps": len(cell),
        "success": share,
        "error": math.sqrt(share * (1 - share) / len(cell)),
        "thinking_tokens": sum(tokens for _, tokens, _ in cell) / len(cell),
        "format_valid": sum(valid for _, _, valid in cell) / len(cell),
    }


def is_causal(table: dict[str, Any]) -> bool:
    """Whether thinking decides the hard steps and not the easy ones."""
    return all(
        low <= table["cells"][f"{level}/{kind}"]["success"] <= high for (level, kind), (low, high) in WANTED.items()
    )


def show(table: dict[str, Any]) -> str:
    """The table as Markdown."""
    lines = [
        "| level | easy steps | hard steps | thinking tokens, easy / hard | format valid |",
        "|---|---|---|---|---|",
    ]
    for level in "1234":
        easy, hard = (table["cells"][f"{level}/{kind}"] for kind in ("easy", "hard"))
        valid = (easy["format_valid"] * easy["steps"] + hard["format_valid"] * hard["steps"]) / (
            easy["steps"] + hard["steps"]
        )
        lines.append(
            f"| {level} | {_percent(easy)} | {_percent(hard)} "
            f"| {easy['thinking_tokens']:.1f} / {hard['thinking_tokens']:.1f} | {valid:.1%} |"
        )
    verdict = "thinking is causal here" if is_causal(table) else "thinking is NOT causal here: change the environment"
    return "\n".join([*lines, "", f"{table['houses']} held-out houses, temperature {table['temperature']}: {verdict}"])


def _percent(cell: dict[str, float]) -> str:
    return f"{cell['success']:.1%} ± {cell['error']:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="model folder")
    parser.add_argument("--houses", type=int, default=200, help="held-out houses")
    parser.add_argument("--temperature", type=float, default=1.0, help="sampling temperature")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    args = parser.parse_args()
    table = forced_table(args.model, houses=args.houses, temperature=args.temperature, seed=args.seed)
    if args.json:
        args.json.write_text(json.dumps(table, indent=1) + "\n")
    print(show(table))
    sys.exit(0 if is_causal(table) else 1)


if __name__ == "__main__":
    main()
