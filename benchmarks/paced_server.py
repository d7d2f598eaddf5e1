"""`toolwise serve` with a stand-in for a fast GPU: what HTTP, text and the event loop cost is real, the model is not.

    python benchmarks/paced_server.py FOLDER --port 8000 --stream-interval-ms 20

The engine is the real one, its thread, scheduler and streams included, but its runner sleeps for as long as an H200
computes a step of a 1.6B model, and samples random tokens. `serve.py --paced` starts it and measures.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from toolwise.cli.rollout import load_agent
from toolwise.engine import Engine
from toolwise.engine.cpu_runner import CpuRunner, DecodedSteps
from toolwise.engine.request import Request
from toolwise.engine.runner import SplitChunks
from toolwise.engine.scheduler import Plan
from toolwise.serve.service import ServiceConfig, serve

STEP_S, PROMPT_TOKEN_S = 0.0036, 4.6e-6
"""As measured on an H200: 256 requests of 256 + 256 tokens take 1.23 s without HTTP, 0.3 of them for the prompts."""
BATCH_TOKENS = 65_536
"""Prompt tokens of one step, as on that GPU."""
WORDS = 512, 40_000
TOKENS = random.Random(0).choices(range(*WORDS), [1 / rank for rank in range(1, WORDS[1] - WORDS[0] + 1)], k=100_000)
"""What is sampled: words of the benchmark's tokenizer, as often as words are (Zipf)."""


class PacedRunner(CpuRunner):
    """Takes the time of a GPU, and hardly any CPU."""

    slower = 1.0

    def allocate(self, blocks: int) -> None:
        self.keys = [torch.empty(0)]

    def copy(self, copies: dict[int, int]) -> None:
        pass

    def pack_weights(self) -> bool:
        return False

    def has_room(self, requests: Sequence[Request]) -> bool:
        return True

    def run(self, plan: Plan, chunks: SplitChunks) -> tuple[torch.Tensor, dict[Request, list[int]]]:
        time.sleep(self.slower * (STEP_S + PROMPT_TOKEN_S * sum(plan.values())))
        ready = [request for request, count in plan.items() if count and request.held + count == len(request.tokens)]
        return torch.zeros(len(ready), 1), {request: [row] for row, request in enumerate(ready)}

    def decode_multi_step(
        self, requests: Sequence[Request], steps: int, interrupted: Callable[[], bool], *more: Any
    ) -> DecodedSteps:
        steps = min(steps, *(request.sampling.max_new_tokens - request.sampled for request in requests))
        for step in range(steps):
            time.sleep(self.slower * STEP_S)
            if interrupted():
                steps = step + 1
                break
        starts = [random.randrange(len(TOKENS) - steps) for _ in requests]  # hardly any work
        return [TOKENS[start : start + steps] for start in starts], [[-1.0] * steps for _ in requests]


def use_stand_in(engine: Any, slower: float) -> None:
    assert isinstance(engine, Engine)
    engine.runner = PacedRunner(engine.model, engine.blocks.size, engine.results.head)
    engine.runner.slower = slower
    engine.results.head = lambda states: torch.zeros(len(states), WORDS[0])  # of the first tokens
    engine.scheduler.max_batch_tokens = BATCH_TOKENS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--stream-interval-ms", type=float, default=20.0)
    parser.add_argument("--slower", type=float, default=1.0, help="makes steps and intervals this many times as long")
    options = parser.parse_args()

    def load(known: Any) -> Any:
        agent = load_agent(options.folder, ["none"], None, ["model.device=cpu", "model.dtype=float32"], False)
        use_stand_in(agent.policy.engine, options.slower)
        return agent

    config = ServiceConfig(
        "m", port=options.port, mode="model", stream_interval_s=options.slower * options.stream_interval_ms / 1000
    )
    torch.set_num_threads(1)
    serve(config, load, print)


if __name__ == "__main__":
    main()
