"""Cost of thinking steps over at the other levels, with and without the prefix cache. Numbers: docs/thinking.md.

    python benchmarks/thinking.py                       the model that ships, on this machine
    python benchmarks/thinking.py --layers 24 --width 1024 --device cuda --dtype bfloat16

For steps of several rollouts with histories of a few hundred tokens, write three thoughts from the history with the
level forced, then score the step's action after all four, using the thinking stage's writer and scorer on the engine.
The work is the same with and without the engine's prefix cache. Thoughts have the maximum length, and are closed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from toolwise.protocols import Generation, Sampling
from toolwise.thinking.alternatives import AlternativeWriter
from toolwise.thinking.level_scores import score_levels
from toolwise.thinking.levels import DEFAULT_LEVELS, END_THINK
from toolwise.thinking.parsed_step import ParsedStep, token_spans
from toolwise.thinking.reply import parse_reply
from toolwise.thinking.thinking_model import EngineModel

REPLY = "<level>3</level><think>State: a hall Goal: out Reflect: left is free</think><action>go left</action>"
OBSERVATION = "You are in a hall with doors to the left and to the right."


class Closing(EngineModel):
    """The engine, with every thought closed: an untrained model's never end, which would leave nothing to score."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
        found = await self.engine.generate(token_ids, replace(sampling, stop_token_ids=()))
        plain = CHAT.encode(" hall")[0]
        ids = [plain] * (len(found.token_ids) - 1) + CHAT.encode(END_THINK)
        return Generation(ids, [0.0] * len(ids), "stop", found.policy_version)


CHAT: Any = None


def make_steps(rollouts: int, turns: int, tokens_a_turn: int) -> list[ParsedStep]:
    """Steps whose histories grow turn by turn, as in an episode; all rollouts share the beginning."""
    reply = CHAT.encode(REPLY)
    words = CHAT.encode(OBSERVATION)
    reading = parse_reply(REPLY)
    spans = token_spans(reply, CHAT.decode, reading)
    task = [words[i % len(words)] for i in range(tokens_a_turn)]
    steps = []
    for number in range(rollouts):
        rng, history = Random(number), list(task)
        for turn in range(turns):
            steps.append(
                ParsedStep(f"r{number}", "g", turn, tuple(history), reply, [0.0] * len(reply), REPLY, reading, spans)
            )
            history += [*reply, *(rng.choice(words) for _ in range(tokens_a_turn - len(reply)))]
    return steps


def think(engine: Any, steps: Sequence[ParsedStep], thought_tokens: int) -> tuple[float, float]:
    """Seconds spent writing and scoring."""
    model = Closing(engine)
    writer = AlternativeWriter(model, CHAT, DEFAULT_LEVELS, Sampling(max_new_tokens=thought_tokens))

    async def work() -> tuple[float, float]:
        began = time.perf_counter()
        alternatives = await writer.write(steps)
        wrote = time.perf_counter()
        found = await score_levels(model, CHAT, steps, alternatives, leak_nats=float("inf"))
        assert all(group is not None and len(group.scores) == 4 for group in found.groups), found.failures
        return wrote - began, time.perf_counter() - wrote

    return asyncio.run(work())


def warm(engine: Any, steps: Sequence[ParsedStep]) -> None:
    """Fill the cache as the rollouts would: with each episode's last history and all its prefixes."""
    last = {step.rollout_id: step for step in steps}

    async def work() -> None:
        await asyncio.gather(*(engine.encode(step.history) for step in last.values()))

    asyncio.run(work())


def build(args: argparse.Namespace) -> Any:
    global CHAT
    import torch

    from toolwise.models import load_model

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model, CHAT = load_model("builtin:small", device=args.device, dtype=args.dtype)
    if args.layers:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=model.config.vocab_size,
            hidden_size=args.width,
            intermediate_size=3 * args.width,
            num_hidden_layers=args.layers,
            num_attention_heads=args.width // 64,
            num_key_value_heads=max(1, args.width // 256),
            max_position_embeddings=8192,
        )
        model = LlamaForCausalLM(config).to(device=args.device, dtype=getattr(torch, args.dtype)).eval()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=8, help="number of rollouts")
    parser.add_argument("--turns", type=int, default=6, help="turns per rollout")
    parser.add_argument("--tokens-a-turn", type=int, default=96, help="tokens that each turn adds to the history")
    parser.add_argument("--thought-tokens", type=int, default=24, help="tokens per thought")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions; the median counts")
    parser.add_argument("--layers", type=int, default=0, help="layers of a random Llama; 0: the model that ships")
    parser.add_argument("--width", type=int, default=1024, help="hidden size of the random Llama")
    parser.add_argument("--device", default="cpu", help="torch device")
    parser.add_argument("--dtype", default="float32", help="torch dtype")
    args = parser.parse_args()
    model = build(args)
    from toolwise.engine import Engine

    steps = make_steps(args.rollouts, args.turns, args.tokens_a_turn)
    histories = sum(len(step.history) for step in steps)
    print(f"{len(steps)} steps, histories of {histories / len(steps):.0f} tokens; load {os.getloadavg()[0]:.1f}")
    seconds: dict[str, list[float]] = {}
    for _ in range(args.repeats):
        for name in ("shared, after the rollouts", "shared, from nothing", "not shared"):
            engine = Engine(model, prefix_cache=name != "not shared", memory_mb=None if args.device != "cpu" else 512)
            if name == "shared, after the rollouts":
                warm(engine, steps)
            before = engine.metrics()
            wrote, scored = think(engine, steps, args.thought_tokens)
            after = engine.metrics()
            seconds.setdefault(name, []).append(wrote + scored)
            prefilled = after["engine/prefilled_tokens"] - before["engine/prefilled_tokens"]
            print(f"  {name}: {wrote:.2f} s writing, {scored:.2f} s scoring, {prefilled:,.0f} tokens prefilled")
    whole = statistics.median(seconds["not shared"])
    for name, found in seconds.items():
        print(f"{name}: {statistics.median(found):.2f} s, {statistics.median(found) / whole:.0%} of not shared")
    # Histories of one rollout are prefixes of each other, and rollouts of one task share their first turn.
    distinct = len({step.history[: n + 1] for step in steps for n in range(len(step.history))})
    print(f"distinct history tokens {distinct:,}; with two thoughts and four contexts each, {6 * histories:,}")
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
