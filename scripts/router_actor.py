"""Make the actor of the router experiment: the model that ships, trained by SFT to obey its route.

    python scripts/router_actor.py --out runs/router/actor

With one family's tools it calls one, whether that helps or not; without tools it answers; with all tools, as in the
original prompt, it does what is best. So a wrong route has its real cost: an unnecessary call, or a wrong answer that
could have been right. (An actor trained on the demo's reward under every route learns not to make useless calls, and
leaves a router nothing to decide.) The router sees none of this.
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
from toolwise.demo.tasks import KINDS, make_row
from toolwise.tools.builtin.calculator import CalculatorTool
from toolwise.tools.builtin.search.tool import SearchTool

TOOL_OFFERS: list[tuple[list[str], float]] = [
    (["calculator", "search"], 0.4),
    (["search"], 0.25),
    (["calculator"], 0.25),
    ([], 0.1),
]
"""Tools on offer, and how often: the original prompt, the two families, and none."""


async def obedient(row: dict[str, Any], offered: list[str], rng: Random) -> list[dict[str, Any]]:
    """One conversation about one task."""
    info, answer = row["extra_info"], row["reward_model"]["ground_truth"]
    documents = info["tools_kwargs"]["search"]["create_kwargs"]["documents"]
    tools = {"calculator": CalculatorTool({}), "search": SearchTool({})}
    wanted: list[list[str]] = info["plan"]
    calls = wanted if len(offered) == 2 and info["kind"] != "known" else []
    if len(offered) == 1:
        text = next((text for name, text in wanted if name == offered[0]), wanted[0][1])
        calls = [[offered[0], text]]
    messages = list(row["prompt"])
    for name, text in calls:
        await teacher._call(messages, tools[name], name, text, documents)
    settled = info["kind"] == "known" or calls == wanted
    said = answer if settled else teacher._wrong_answer(answer, rng)
    return [*messages, {"role": "assistant", "content": f"Answer: {said}"}]


async def conversations(count: int, seed: int) -> list[dict[str, Any]]:
    rng = Random(f"obedient/{seed}")
    offers, odds = zip(*TOOL_OFFERS, strict=True)
    rows = []
    for index in range(count):
        [offered] = rng.choices(offers, odds)
        row = make_row(rng.choice(KINDS), rng, index, "teach")
        rows.append(
            {
                "messages": await obedient(row, offered, rng),
                "tools": [teacher._SCHEMAS[name] for name in offered],
            }
        )
    return rows


def teach(out: Path, *, rows: int = 8000, steps: int = 150, seed: int = 0, batch_tokens: int = 8192) -> None:
    """Train the actor and write it to `out`, atomically."""
    partial = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    taught = asyncio.run(conversations(rows, seed))
    figures = toolwise.sft(
        "builtin:small", taught, partial, steps=steps, batch_tokens=batch_tokens, row_tokens=512, lr=4e-4, seed=seed
    )
    partial.rename(out)
    print(f"{out}: loss {figures['first_loss']:.3f} -> {figures['loss']:.3f} on {rows} conversations", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="model folder to write")
    parser.add_argument("--rows", type=int, default=8000, help="number of conversations")
    parser.add_argument("--steps", type=int, default=150, help="training steps")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    teach(args.out, rows=args.rows, steps=args.steps)
