"""Benchmark the engine on a CPU against batched `generate` on multi-turn requests, and time later turns.

    python benchmarks/engine_cpu.py                      the model that ships, two threads, about two minutes
    python benchmarks/engine_cpu.py --model FOLDER       another model, such as a SmolLM2 folder
    python benchmarks/engine_cpu.py --part turns         one part only: mixed, turns

mixed: 64 conversations of four turns with user messages and replies of varying lengths. All replies of a turn finish
before the next turn starts, because `generate` can do no better. Both sample every reply to its full length; `generate`
samples all to the longest, and does not compute log-probs.
turns: one conversation, and 64 at once, of ten turns of 24 + 24 tokens: the time of each turn, and a check that no
token was computed twice.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from typing import Any

import torch

from toolwise.engine import Engine
from toolwise.models import load_model
from toolwise.protocols import Sampling

CONVERSATIONS, TURNS, LATER_TURNS = 64, 4, 10
SAID, REPLIES = (8, 96), (4, 96)
Talk = list[list[int]]
Turn = list[tuple[list[int], int]]
"""The user message of each conversation, and the length of its reply."""


def mixed_turns(vocabulary: int, seed: int) -> list[Turn]:
    drawn = random.Random(seed)

    def one() -> tuple[list[int], int]:
        said = [drawn.randrange(10, vocabulary) for _ in range(drawn.randint(*SAID))]
        return said, min(REPLIES[1], REPLIES[0] + int(drawn.expovariate(1 / 24)))

    return [[one() for _ in range(CONVERSATIONS)] for _ in range(TURNS)]


def equal_turns(vocabulary: int, seed: int, conversations: int) -> list[Turn]:
    drawn = random.Random(seed)
    return [
        [([drawn.randrange(10, vocabulary) for _ in range(24)], 24) for _ in range(conversations)]
        for _ in range(LATER_TURNS)
    ]


def with_engine(model: Any, turns: list[Turn]) -> tuple[list[float], dict[str, float]]:
    engine = Engine(model)
    talk: Talk = [[] for _ in turns[0]]
    seconds = []

    async def reply(turn: Turn) -> list[Any]:
        work = (
            engine.generate(ids, Sampling(max_new_tokens=new, seed=i))
            for i, (ids, (_, new)) in enumerate(zip(talk, turn, strict=True))
        )
        return list(await asyncio.gather(*work))

    for turn in turns:
        for ids, (said, _) in zip(talk, turn, strict=True):
            ids += said
        began = time.perf_counter()
        replies = asyncio.run(reply(turn))
        seconds.append(time.perf_counter() - began)
        for ids, found in zip(talk, replies, strict=True):
            ids += found.token_ids
    return seconds, engine.metrics()


@torch.inference_mode()
def with_generate(model: Any, turns: list[Turn]) -> list[float]:
    talk: Talk = [[] for _ in range(CONVERSATIONS)]
    seconds = []
    for turn in turns:
        for ids, (said, _) in zip(talk, turn, strict=True):
            ids += said
        began = time.perf_counter()
        width = max(map(len, talk))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in talk])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in talk])
        longest = max(new for _, new in turn)
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=True,
            top_k=0,
            pad_token_id=0,
        )
        seconds.append(time.perf_counter() - began)
        for row, found, (_, new) in zip(talk, out[:, width:].tolist(), turn, strict=True):
            row += found[:new]
    return seconds


def mixed(model: Any, repeats: int) -> None:
    turns = mixed_turns(model.config.vocab_size, 0)
    tokens = sum(new for turn in turns for _, new in turn)
    ours, theirs = [], []
    for _ in range(repeats):  # alternate, so that other load affects both
        seconds, metrics = with_engine(model, turns)
        ours.append(sum(seconds))
        print(f"        engine {ours[-1]:.2f} s", end="", flush=True)
        theirs.append(sum(with_generate(model, turns)))
        print(f"   generate {theirs[-1]:.2f} s   ({load()})", flush=True)
    best, other = min(ours), min(theirs)
    print(
        f"mixed   engine {best:.2f} s ({tokens / best:.0f} tokens/s)   generate {other:.2f} s ({tokens / other:.0f} "
        f"tokens/s)   {other / best:.2f} x   prefilled {metrics['engine/prefilled_tokens']:.0f}, reused "
        f"{metrics['engine/reused_tokens']:.0f}, decoded {metrics['engine/decoded_tokens']:.0f}   ({load()})"
    )


def turns(model: Any, repeats: int) -> None:
    for conversations in (1, CONVERSATIONS):
        plan = equal_turns(model.config.vocab_size, 1, conversations)
        runs = [with_engine(model, plan) for _ in range(repeats)]
        best = [min(seconds[turn] for seconds, _ in runs) for turn in range(LATER_TURNS)]
        told = " ".join(f"{second * 1000:.0f}" for second in best)
        metrics = runs[0][1]
        computed = metrics["engine/prefilled_tokens"] + metrics["engine/decoded_tokens"]
        assert computed == conversations * (LATER_TURNS * 48 - 1), "a token was computed twice"
        print(
            f"turns   {conversations:2} at once: {told} ms   turn 10 is {best[9] / best[1]:.2f} x turn 2   ({load()})"
        )


def load() -> str:
    return f"load {os.getloadavg()[0]:.1f}, {torch.get_num_threads()} threads"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:small", help="model folder")
    parser.add_argument("--part", choices=["mixed", "turns"], help="run only this part")
    parser.add_argument("--threads", type=int, default=2, help="threads of both sides")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions; the best counts")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model, _ = load_model(given.model, device="cpu")
    with_engine(model, [[([1, 2, 3], 2)] * CONVERSATIONS])  # warm up
    if given.part != "turns":
        mixed(model, given.repeats)
    if given.part != "mixed":
        turns(model, given.repeats)


if __name__ == "__main__":
    main()
