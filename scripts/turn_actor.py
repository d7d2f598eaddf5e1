"""Make the actor of the turn-routing experiment: the model that ships, trained by SFT to call whatever is available.

    python scripts/turn_actor.py --out runs/turns/actor

Questions ask for a fact plus a small number: "How many mills would Alder have with 7 more?". In half of them the fact
is a small number too, and the model knows the sum by heart once it has looked the fact up; in the others it needs the
calculator. Nothing in the question tells which: only the lookup does.

The model makes the next call whenever it can, whether it needs the result or not, as a model does that was never
charged for calls. If it cannot, or sometimes anyway, it answers: with the truth if it knows it, with a guess otherwise.
After a refused call it goes on as before. So when to stop is left to the router.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
from pathlib import Path
from random import Random
from typing import Any

import small_world_teacher as teacher

import toolwise
from toolwise.demo.tasks import KNOWN_CALCULATIONS, PLACES, THINGS, Calculation, Fact, is_known, make_row
from toolwise.tools.builtin.calculator import CalculatorTool
from toolwise.tools.builtin.search.tool import SearchTool

OFFERS: list[tuple[list[str], float]] = [
    (["calculator", "search"], 0.55),
    (["search"], 0.37),
    (["calculator"], 0.04),
    ([], 0.04),
]
"""Tools on offer, and how often."""
STOP, REFUSED = 0.12, 0.1
"""How often a demonstration answers before its last call, and how often a call is refused."""
SMALL_SUMS = [c for c in KNOWN_CALCULATIONS if c.operator == "+"]
TOOLS = ["calculator", "search"]


def make_task(rng: Random, index: int, split: str) -> dict[str, Any]:
    """A dataset row. `extra_info.easy`: whether the model knows the sum once it has looked up the fact."""
    row = make_row("two_step", rng, index, split)
    known = rng.choice(SMALL_SUMS)
    easy = rng.random() < 0.5
    value = known.left if easy else rng.randint(100, 989)
    fact = Fact(*_unknown(rng), value)
    total = Calculation(value, "+", known.right)
    others = [Fact(place, thing, rng.randint(1, 989)) for place, thing in (_unknown(rng) for _ in range(5))]
    documents = [f.sentence() for f in (fact, *others) if f is fact or (f.place, f.thing) != (fact.place, fact.thing)]
    rng.shuffle(documents)
    question = f"How many {fact.thing} would {fact.place} have with {known.right} more?"
    row["prompt"] = [{"role": "user", "content": question}]
    row["reward_model"] = {"style": "rule", "ground_truth": str(total.value)}
    row["extra_info"] |= {
        "easy": easy,
        "plan": [["search", f"{fact.place} {fact.thing}"], ["calculator", total.expression]],
        "tools_kwargs": {"search": {"create_kwargs": {"documents": documents}}},
    }
    return row


def _unknown(rng: Random) -> tuple[str, str]:
    while True:
        place, thing = rng.choice(PLACES), rng.choice(THINGS)
        if not is_known(place, thing):
            return place, thing


async def demonstrate(row: dict[str, Any], offered: list[str], rng: Random) -> list[dict[str, Any]]:
    """One conversation about one task."""
    info, answer = row["extra_info"], row["reward_model"]["ground_truth"]
    documents = info["tools_kwargs"]["search"]["create_kwargs"]["documents"]
    tools = {"calculator": CalculatorTool({}), "search": SearchTool({})}
    plan: list[list[str]] = info["plan"]
    messages, made = list(row["prompt"]), 0
    while made < len(plan) and plan[made][0] in offered and rng.random() >= STOP:
        name, text = plan[made]
        if len(offered) == 2 and rng.random() < REFUSED:
            await teacher._call(messages, tools[name], name, text, documents)
            left = rng.choice([*(other for other in offered if other != name), "none"])
            messages[-1]["content"] = f"error: {name} is not to be used for this request; tools: {left}"
            continue
        await teacher._call(messages, tools[name], name, text, documents)
        made += 1
    settled = made == len(plan) or (info["easy"] and made == 1)
    said = answer if settled else teacher._wrong_answer(answer, rng)
    return [*messages, {"role": "assistant", "content": f"Answer: {said}"}]


async def conversations(count: int, seed: int) -> list[dict[str, Any]]:
    rng = Random(f"turn actor/{seed}")
    offers, odds = zip(*OFFERS, strict=True)
    rows = []
    for index in range(count):
        [offered] = rng.choices(offers, odds)
        row = make_task(rng, index, "teach")
        messages = await demonstrate(row, offered, rng)
        rows.append({"messages": messages, "tools": [teacher._SCHEMAS[name] for name in offered]})
    return rows


def teach(out: Path, *, rows: int, steps: int, seed: int) -> None:
    """Train the actor and write it to `out`, atomically."""
    partial = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    taught = asyncio.run(conversations(rows, seed))
    figures = toolwise.sft(
        "builtin:small", taught, partial, steps=steps, batch_tokens=4096, row_tokens=512, lr=1e-3, seed=seed
    )
    partial.rename(out)
    print(f"{out}: loss {figures['first_loss']:.3f} -> {figures['loss']:.3f} on {rows} conversations", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="model folder to write")
    parser.add_argument("--rows", type=int, default=8000, help="conversations")
    parser.add_argument("--steps", type=int, default=200, help="training steps")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    teach(args.out, rows=args.rows, steps=args.steps, seed=args.seed)


if __name__ == "__main__":
    main()
