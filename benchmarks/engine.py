"""Benchmark the engine on a GPU against `transformers.generate`: tokens per second, and the share of the roofline.

    python benchmarks/engine.py                 all parts, about three minutes on an H200
    python benchmarks/engine.py 135m 1.6b       256 requests of 512 + 128 tokens, distinct prompts, cold cache
    python benchmarks/engine.py groups          32 groups of 8 that share a prompt of 1,024 tokens, 128 new ones
    python benchmarks/engine.py tails           the same, each prompt with one more token that is not shared

Random weights in bf16, EOS ignored, log-probs on, prefill included. The roofline is the
prompts' products at the matmul rate measured here and, for each decode step, weights and caches read once at the copy
rate measured here.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from typing import Any

import torch
from shapes import GROUPED_1_6B, SHAPES
from transformers import LlamaConfig, LlamaForCausalLM

from toolwise.concurrency.garbage import relaxed_gc
from toolwise.engine import Engine, cuda_graphs
from toolwise.engine.cuda_runner import CudaRunner
from toolwise.protocols import Sampling

MODELS = {"135m": SHAPES["135m"], "1.6b": GROUPED_1_6B}
REQUESTS, PROMPT, NEW = 256, 512, 128
GROUPS, SIZE, SHARED = 32, 8, 1024


def make(shape: str) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**MODELS[shape], head_dim=64, max_position_embeddings=8192)
    with torch.device("cuda"):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    drawn = torch.randint(0, 49152, (count, length), generator=torch.Generator().manual_seed(seed))
    ids: list[list[int]] = drawn.tolist()
    return ids


def ask(engine: Engine, asked: list[list[int]], new: int) -> float:
    """Seconds until the last request is finished."""

    async def all_of_them() -> None:
        samplings = (Sampling(max_new_tokens=new, seed=n) for n in range(len(asked)))
        found = await asyncio.gather(*(engine.generate(p, s) for p, s in zip(asked, samplings, strict=True)))
        assert all(len(g.token_ids) == new for g in found)

    torch.cuda.synchronize()
    began = time.perf_counter()
    asyncio.run(all_of_them())
    return time.perf_counter() - began


class Stopwatch:
    """Time spent in multi-step decoding, and the tokens it produced."""

    def __init__(self, engine: Engine) -> None:
        assert isinstance(engine.runner, CudaRunner)
        self.seconds, self.tokens, ahead = 0.0, 0, engine.runner.decode_multi_step

        def timed(requests: Any, *how: Any) -> Any:
            torch.cuda.synchronize()
            began = time.perf_counter()
            found = ahead(requests, *how)
            self.seconds += time.perf_counter() - began
            self.tokens += sum(map(len, found[0]))
            return found

        engine.runner.decode_multi_step = timed  # type: ignore[method-assign]


def machine() -> tuple[float, float]:
    """FLOP/s of a large bf16 product, bytes/s of a large copy (read and written)."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    big, other = (torch.empty(4 << 30, device="cuda", dtype=torch.uint8) for _ in range(2))
    return 2 * 8192**3 / seconds(lambda: a @ a), 2 * big.numel() / seconds(lambda: other.copy_(big))


def seconds(work: Any, times: int = 10) -> float:
    work()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / times


def rooflines(model: Any, flops: float, bandwidth: float) -> tuple[float, float]:
    """Tokens per second: end to end, and decoding only."""
    config = model.config
    weights = sum(p.numel() for p in model.parameters())
    layers, kv_heads, size = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    per_token = 2 * layers * kv_heads * size * 2
    decode_s = NEW * (2 * weights + REQUESTS * (PROMPT + NEW / 2) * per_token) / bandwidth
    attention = 4 * layers * config.num_attention_heads * size * REQUESTS * PROMPT**2 / 2
    body = weights - config.vocab_size * config.hidden_size
    prefill_s = (2 * body * REQUESTS * PROMPT + attention) / flops
    return REQUESTS * NEW / (prefill_s + decode_s), REQUESTS * NEW / decode_s


def generate_s(model: Any) -> float:
    """Seconds that `transformers.generate` takes, with log-probs."""
    ids = torch.tensor(prompts(REQUESTS, PROMPT, 2), device="cuda")
    settings = {"min_new_tokens": NEW, "max_new_tokens": NEW, "do_sample": True, "top_k": 0, "pad_token_id": 0}
    settings |= {"return_dict_in_generate": True, "output_scores": True, "eos_token_id": None}

    def generate() -> Any:
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        return model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)

    return seconds(generate, times=1)


def against_generate(shape: str, flops: float, bandwidth: float) -> None:
    model = make(shape)
    engine = Engine(model, memory_mb=24_000)
    ask(engine, prompts(REQUESTS, PROMPT, 1), NEW)  # compiles kernels and captures CUDA graphs
    figures = []
    for attempt in range(3):
        engine.weights_changed(attempt)  # empties the prefix cache
        watch = Stopwatch(engine)
        took = ask(engine, prompts(REQUESTS, PROMPT, 2), NEW)
        figures.append((took, watch.seconds, watch.tokens))
    took, decode_s, decoded = min(figures)
    ours, decoding = REQUESTS * NEW / took, decoded / decode_s
    engine.drop_cache()
    theirs = REQUESTS * NEW / generate_s(model)
    whole, alone = rooflines(model, flops, bandwidth)
    print(
        f"{shape:6}  end to end {ours:9,.0f} tokens/s ({ours / whole:.0%} of the roofline, {ours / theirs:.1f} x "
        f"generate's {theirs:,.0f})  decoding {decoding:9,.0f} ({decoding / alone:.0%})  "
        f"peak {torch.cuda.max_memory_allocated() >> 20:,} MiB  all runs {[round(f[0], 3) for f in figures]} s",
        flush=True,
    )
    del engine, model
    gc.collect()
    torch.cuda.empty_cache()


def groups(shape: str, tail: int) -> None:
    model = make(shape)
    shared = prompts(GROUPS, SHARED, 3)
    asked = [[*p, *([member] * tail)] for p in shared for member in range(SIZE)]
    found: dict[str, tuple[float, float]] = {}
    worth = cuda_graphs.MIN_SHARED_FRACTION
    for name, cache, worth_it in (("nothing", False, 9.0), ("prefill", True, 9.0), ("decoding too", True, worth)):
        cuda_graphs.MIN_SHARED_FRACTION = worth_it
        engine = Engine(model, memory_mb=40_000, prefix_cache=cache)
        ask(engine, asked, NEW)
        times = []
        for attempt in range(5):
            engine.weights_changed(2 * attempt)
            first = ask(engine, asked, 1)
            engine.weights_changed(2 * attempt + 1)
            times.append((first, ask(engine, asked, NEW)))
        found[name] = min(f for f, _ in times), min(w for _, w in times)
        engine.drop_cache()
        prefill, whole = found[name]
        than = found["nothing"]
        kind = "tails" if tail else "groups"
        print(
            f"{shape:6}  {kind:6}, shared: {name:12}  first tokens {prefill:.3f} s "
            f"({than[0] / prefill:.2f} x)  "
            f"all {whole:.3f} s ({than[1] / whole:.2f} x)  {GROUPS * SIZE * NEW / whole:9,.0f} tokens/s",
            flush=True,
        )
        del engine
    cuda_graphs.MIN_SHARED_FRACTION = worth
    del model
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a GPU; benchmarks/engine_cpu.py does not")
    flops, bandwidth = machine()
    torch.cuda.empty_cache()
    print(
        f"{torch.cuda.get_device_name()}  torch {torch.__version__}  {flops / 1e12:.0f} TFLOP/s  "
        f"{bandwidth / 1e12:.2f} TB/s  load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    with relaxed_gc():  # as every batch of rollouts does
        for part in sys.argv[1:] or ["135m", "1.6b", "groups", "tails"]:
            if part in ("groups", "tails"):
                groups("135m", tail=int(part == "tails"))
            else:
                against_generate(part, flops, bandwidth)


if __name__ == "__main__":
    main()
