"""Check the engine's GPU kernels against plain torch, time them in CUDA graphs, then time a whole decode step.

`python benchmarks/engine_kernels.py` on a CUDA GPU (bf16, 256 requests of 512 to 640 keys, random weights); `--shape
135m` or `1.6b` for one shape, `--tune` to try other tiles. The roofline is the bytes that each call must
move, at 4.3 TB/s.
"""

# ruff: noqa: B023  (every lambda is used before its loop continues)
from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from shapes import GROUPED_1_6B, SHAPES
from torch.nn import functional as F

from toolwise.kernels import kernel, torch_reference
from toolwise.kernels.fused_decoder import FusedDecoder, PagedCache, PrefixGroups

MODELS = {"135m": SHAPES["135m"] | {"head_dim": 64}, "1.6b": GROUPED_1_6B | {"head_dim": 64}}
BANDWIDTH = 4.3e12
BLOCK = 16
DEVICE = "cuda"
STARTED = time.monotonic()
WRONG: list[str] = []


def say(*words: Any) -> None:
    print(*words, flush=True)


@contextmanager
def part(name: str) -> Iterator[None]:
    """A failed part does not stop the others: device time is scarce."""
    began = time.monotonic()
    try:
        yield
    except Exception as problem:  # report and continue
        say(f"{name}: FAILED {type(problem).__name__}: {str(problem)[:600]}")
    say(f"  ({name}: {time.monotonic() - began:.1f} s, {time.monotonic() - STARTED:.0f} s in all)")


def graph_us(call: Callable[[int], Any], count: int, *, repeats: int = 5) -> float:
    """Microseconds per call(i); the graph captures i = 0..count-1 in sequence."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(min(count, 3)):
            call(i)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            call(i)
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(4):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / 4 / count)
    return statistics.median(times)


def row(name: str, us: float, moved: float, layers: int = 1) -> None:
    floor = moved / BANDWIDTH * 1e6
    share = f"{moved / us / 1e6:7.2f} TB/s  {floor / us:5.0%} of roofline"
    say(f"  {name:<44} {us:8.2f} us  {share}  x{layers} = {us * layers / 1e3:6.3f} ms")


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, device=DEVICE)


def ints(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.as_tensor(values, dtype=dtype, device=DEVICE)


class Batch:
    """`batch` requests of `low`..`high` keys in randomly assigned blocks, for one layer shape."""

    def __init__(self, shape: dict[str, Any], batch: int, low: int, high: int) -> None:
        self.heads, self.kv_heads, self.dim = (
            shape["num_attention_heads"],
            shape["num_key_value_heads"],
            shape["head_dim"],
        )
        self.batch, self.columns = batch, -(-(high + 1) // BLOCK)
        self.blocks = batch * self.columns
        self.tables = torch.randperm(self.blocks, device=DEVICE).view(batch, -1).int()
        self.lengths = torch.linspace(low, high, batch, device=DEVICE).int()
        self.slots = self.slot(self.lengths.long() - 1)
        self.keys = int(self.lengths.sum())
        self.scale = self.dim**-0.5

    def slot(self, position: torch.Tensor) -> torch.Tensor:
        return self.tables.long().gather(1, (position // BLOCK)[:, None])[:, 0] * BLOCK + position % BLOCK

    def cache(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return randn(self.blocks, BLOCK, self.kv_heads, self.dim, dtype=dtype)

    @property
    def kv_bytes(self) -> int:
        return self.keys * self.kv_heads * self.dim * 2 * 2


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def check(name: str, got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    e = error(got, want)
    most = float((got.double() - want.double()).abs().max())
    say(f"  {name:<44} relative {e:.1e}  max {most:.1e}  {'ok' if e < bound else 'WRONG'}")
    if not e < bound:
        WRONG.append(name)


def check_attention(dtype: torch.dtype, bound: float) -> None:
    from toolwise.kernels.new_tokens import NewTokens

    label = str(dtype).removeprefix("torch.")
    shapes = ((9, 3, 64, 37), (32, 8, 64, 5), (32, 32, 64, 300), (8, 2, 128, 9), (6, 3, 32, 4))
    for heads, kv_heads, dim, batch in shapes[:4] if dtype == torch.bfloat16 else shapes[::4]:
        shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim}
        b = Batch(shape, batch, 1, 700)
        k, v, q = b.cache(dtype), b.cache(dtype), randn(batch, heads, dim, dtype=dtype)
        wide = (q.float(), k.float(), v.float())
        want = torch_reference.paged_attention_decode(*wide, b.tables, b.lengths, b.scale)
        decode = kernel("paged_attention_decode", DEVICE)
        name = f"{label} {heads}/{kv_heads}x{dim} B={batch}"
        check(f"decode {name}", decode(q, k, v, b.tables, b.lengths, b.scale), want, bound)
        check(f"decode 3 splits {name}", decode(q, k, v, b.tables, b.lengths, b.scale, splits=3), want, bound)
        qkv = randn(batch, heads + 2 * kv_heads, dim, dtype=dtype)
        cos, sin = randn(batch, dim, dtype=dtype), randn(batch, dim, dtype=dtype)
        weights = {"q_weight": randn(dim, dtype=dtype), "k_weight": randn(dim, dtype=dtype), "eps": 1e-6}
        for norm in ({}, weights):
            ours, theirs = qkv.clone(), qkv.clone()
            parts = [x.split([heads, kv_heads, kv_heads], 1) for x in (ours, theirs)]
            (k1, v1), (k2, v2), (k3, v3) = ((k.clone(), v.clone()) for _ in range(3))
            torch_reference.rope_and_store(*parts[1], cos, sin, k1, v1, b.slots, **norm)  # type: ignore[call-arg]
            got = decode(
                parts[0][0],
                k2,
                v2,
                b.tables,
                b.lengths,
                b.scale,
                new=NewTokens(*parts[0][1:], cos, sin, b.slots, **norm),  # type: ignore[call-arg]
            )
            wide = (parts[1][0].float(), k1.float(), v1.float())
            check(
                f"rope+store+decode {name}",
                got,
                torch_reference.paged_attention_decode(*wide, b.tables, b.lengths, b.scale),
                bound,
            )
            kernel("rope_and_store", DEVICE)(*parts[0], cos, sin, k3, v3, b.slots, **norm)
            check(f"rope q {name}", ours[:, : heads + kv_heads], theirs[:, : heads + kv_heads], bound)
            check(f"caches {name}", torch.cat([k2, v2, k3, v3]), torch.cat([k1, v1, k1, v1]), bound)
        starts = ints([0, 5, 5, 133, 134])
        contexts = ints([5, 300, 400, 257])
        q = randn(134, heads, dim, dtype=dtype)
        args = (b.tables[:4], starts, contexts, b.scale, 128)
        want = torch_reference.paged_attention_prefill(q.float(), k.float(), v.float(), *args)
        check(f"prefill {name}", kernel("paged_attention_prefill", DEVICE)(q, k, v, *args), want, bound)


def check_shared(dtype: torch.dtype, bound: float) -> None:
    b = Batch({"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}, 40, 1, 200)
    k, v, q = b.cache(dtype), b.cache(dtype), randn(40, 9, 64, dtype=dtype)
    tables = torch.randint(0, b.blocks, (6, 20), device=DEVICE).int()
    args = (tables, ints([320, 33, 0, 160, 0, 0]), ints([0, 30, 32, 34, 40, 40, 40]),
            torch.randperm(40, device=DEVICE).int(), 30, b.tables, b.lengths, b.scale)  # fmt: skip
    want = torch_reference.shared_prefix_decode(q.float(), k.float(), v.float(), *args)
    check(f"shared prefix {dtype}", kernel("shared_prefix_decode", DEVICE)(q, k, v, *args), want, bound)


def check_rest(dtype: torch.dtype, bound: float) -> None:
    names = ("rms_norm", "add_rms_norm", "silu_mul", "sample")
    rms_norm, add_rms_norm, silu_mul, sample = (kernel(name, DEVICE) for name in names)
    for width in (576, 2048, 64):
        x, r, w = randn(77, width, dtype=dtype), randn(77, width, dtype=dtype), randn(width, dtype=dtype)
        check(f"rms_norm {width} {dtype}", rms_norm(x, w, 1e-5), torch_reference.rms_norm(x, w, 1e-5), bound)
        for got, want in zip(add_rms_norm(x, r, w, 1e-5), torch_reference.add_rms_norm(x, r, w, 1e-5), strict=True):
            check(f"add_rms_norm {width} {dtype}", got, want, bound)
    x = randn(77, 3072, dtype=dtype)
    check(f"silu_mul {dtype}", silu_mul(x), torch_reference.silu_mul(x), bound)
    for batch, vocab in ((256, 49152), (8, 151936), (3, 2048)):
        logits = randn(batch, vocab, dtype=dtype) * 3
        temperatures = torch.rand(batch, device=DEVICE) + 0.5
        seeds = torch.randint(-(2**62), 2**62, (batch,), device=DEVICE)
        positions = torch.randint(0, 4096, (batch,), device=DEVICE)
        greedy = torch.arange(batch, device=DEVICE) % 4 == 0
        args = (logits, temperatures, seeds, positions, greedy)
        (tokens, logprobs), (want, _) = sample(*args), torch_reference.sample(*args)
        exact = torch.log_softmax(logits.double() / temperatures[:, None].double(), -1).gather(1, tokens[:, None])[:, 0]
        say(f"  sample {batch} x {vocab} {dtype}: {int((tokens == want).sum())} of {batch} tokens as the reference's")
        check("  its log-probs", logprobs, exact, 1e-5)
        alone = torch.cat([sample(*(a[i : i + 1] for a in args))[0] for i in range(min(batch, 16))])
        say(f"    alone as in company: {bool((alone == tokens[:16]).all())}")


def tune(b: Batch, caches: list[tuple[torch.Tensor, torch.Tensor]], q: torch.Tensor, layers: int) -> None:
    from toolwise.kernels.attention_parts import Tiles

    decode = kernel("paged_attention_decode", DEVICE)
    for keys, warps, stages in (
        (64, 4, 3),
        (64, 4, 4),
        (64, 2, 3),
        (64, 2, 4),
        (32, 1, 4),
        (32, 2, 5),
        (128, 4, 3),
        (128, 8, 4),
        (64, 1, 3),
    ):
        for splits in (1, 2) if (keys, warps) == (64, 4) else (1,):
            tiles = Tiles(keys, warps, stages)
            with_part = f"decode {keys}/{warps}/{stages} splits {splits}"
            us = graph_us(
                lambda i: decode(q, *caches[i], b.tables, b.lengths, b.scale, splits=splits, tiles=tiles), layers
            )
            row(with_part, us, b.kv_bytes, layers)


def time_attention(shape: dict[str, Any], batch: int, tuned: bool) -> None:
    from toolwise.kernels.new_tokens import NewTokens

    layers = min(shape["num_hidden_layers"], 12)
    b = Batch(shape, batch, 512, 640)
    caches = [(b.cache(), b.cache()) for _ in range(layers)]
    qkv = randn(batch, b.heads + 2 * b.kv_heads, b.dim)
    q, k, v = qkv.split([b.heads, b.kv_heads, b.kv_heads], 1)
    cos, sin = randn(batch, b.dim), randn(batch, b.dim)
    decode = kernel("paged_attention_decode", DEVICE)
    new = NewTokens(k, v, cos, sin, b.slots)
    real = shape["num_hidden_layers"]
    row("decode", graph_us(lambda i: decode(q, *caches[i], b.tables, b.lengths, b.scale), layers), b.kv_bytes, real)
    row(
        "rope + store + decode in one",
        graph_us(lambda i: decode(q, *caches[i], b.tables, b.lengths, b.scale, new=new), layers),
        b.kv_bytes,
        real,
    )
    if tuned:
        tune(b, caches, q, layers)
    rope = kernel("rope_and_store", DEVICE)
    row(
        "rope_and_store", graph_us(lambda i: rope(q, k, v, cos, sin, *caches[i], b.slots), layers), qkv.nbytes * 2, real
    )
    few = 8
    small = sum(b.lengths[:few].tolist()) * b.kv_heads * b.dim * 4
    row(
        f"decode, {few} requests",
        graph_us(lambda i: decode(q[:few], *caches[i], b.tables[:few], b.lengths[:few], b.scale), layers),
        small,
        real,
    )
    time_shared(b, caches, q, layers, real)
    time_prefill(b, caches, layers, real)


def time_shared(
    b: Batch, caches: list[tuple[torch.Tensor, torch.Tensor]], q: torch.Tensor, layers: int, real: int
) -> None:
    """32 groups of 8 with 512 shared keys and tails of 1..128, against every request reading all its keys."""
    groups, prefix = b.batch // 8, 512
    tails = (b.lengths - prefix).clamp(min=1)
    tables = b.tables.view(groups, 8, -1)[:, 0, : prefix // BLOCK].contiguous()
    shared = kernel("shared_prefix_decode", DEVICE)
    args = (tables, ints([prefix] * groups), ints(range(0, b.batch + 1, 8)), ints(range(b.batch)), 8,
            b.tables[:, prefix // BLOCK :], tails, b.scale)  # fmt: skip
    keys = groups * prefix + int(tails.sum())
    us = graph_us(lambda i: shared(q, *caches[i], *args), layers)
    row(f"shared prefix {groups} x 8, {prefix} keys", us, keys * b.kv_heads * b.dim * 4, real)


def time_prefill(b: Batch, caches: list[tuple[torch.Tensor, torch.Tensor]], layers: int, real: int) -> None:
    from toolwise.kernels.attention_parts import Tiles

    count, length = 32, 512
    q = randn(count * length, b.heads, b.dim)
    starts, contexts = ints(range(0, count * length + 1, length)), ints([length] * count)
    prefill = kernel("paged_attention_prefill", DEVICE)
    flops = 4 * count * length * (length + 1) / 2 * b.heads * b.dim
    for rows, keys, warps, stages in ((128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3), (128, 128, 8, 3)):
        options = {"rows": rows, "tiles": Tiles(keys, warps, stages)}
        us = graph_us(
            lambda i: prefill(q, *caches[i], b.tables[:count], starts, contexts, b.scale, length, **options),
            min(layers, 4),
        )
        speed = f"{us:8.1f} us, {flops / us / 1e6:5.0f} TFLOP/s"
        say(
            f"  prefill {count} x {length}, {rows}/{keys}/{warps}/{stages}: {speed}, x{real} = {us * real / 1e3:.2f} ms"
        )


def time_rest(shape: dict[str, Any], batch: int) -> None:
    width, inner, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    heads, kv_heads, dim = shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"]
    x, r, w = randn(batch, width), randn(batch, width), randn(width)
    add, rms = kernel("add_rms_norm", DEVICE), kernel("rms_norm", DEVICE)
    row("add_rms_norm", graph_us(lambda i: add(x, r, w, 1e-5), 30), x.nbytes * 4, 2 * layers)
    row("rms_norm", graph_us(lambda i: rms(x, w, 1e-5), 30), x.nbytes * 2, 1)
    gate_up, silu = randn(batch, 2 * inner), kernel("silu_mul", DEVICE)
    row("silu_mul", graph_us(lambda i: silu(gate_up), 30), gate_up.nbytes * 1.5, layers)
    products = {
        "qkv": (width, (heads + 2 * kv_heads) * dim),
        "out": (heads * dim, width),
        "gate_up": (width, 2 * inner),
        "down": (inner, width),
    }
    for name, (into, outof) in products.items():
        weights, a = [randn(outof, into) for _ in range(24)], randn(batch, into)
        us = graph_us(lambda i: F.linear(a, weights[i]), 24)
        row(f"product {name} {into} -> {outof}", us, weights[0].nbytes + a.nbytes + batch * outof * 2, layers)
    head, vocab = randn(shape["vocab_size"], width), shape["vocab_size"]
    row("product head", graph_us(lambda i: F.linear(x, head), 4), head.nbytes + batch * vocab * 2)
    for rows in (batch, 8):
        logits = [randn(rows, vocab) for _ in range(6)]
        args = (torch.ones(rows, device=DEVICE), ints(range(rows), torch.int64), ints(range(rows), torch.int64),
                torch.zeros(rows, dtype=torch.bool, device=DEVICE))  # fmt: skip
        sample = kernel("sample", DEVICE)
        row(f"sample {rows} x {vocab}", graph_us(lambda i: sample(logits[i], *args), 6), logits[0].nbytes)


def build(shape: dict[str, Any]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**shape, max_position_embeddings=8192)
    with torch.inference_mode(False), torch.device(DEVICE):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def stock_step(
    model: Any, b: Batch, cache: PagedCache, ids: torch.Tensor, positions: torch.Tensor
) -> Callable[[int], Any]:
    """The model's stock forward, with only our attention kernel plugged into transformers' attention interface."""
    from transformers import AttentionInterface

    store, decode = kernel("store_kv", DEVICE), kernel("paged_attention_decode", DEVICE)

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **others: Any) -> Any:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        keys, values = cache.keys[module.layer_idx], cache.values[module.layer_idx]
        store(k, v, keys, values, b.slots)
        return decode(q, keys, values, b.tables, b.lengths, scaling)[None], None

    AttentionInterface.register("engine_kernels", attend)
    model.config._attn_implementation = "engine_kernels"
    return lambda i: model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]


def exactly(model: Any, b: Any, cache: PagedCache, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Logits of the same weights and caches in fp32."""
    wide = FusedDecoder(copy.deepcopy(model).float())
    caches = ([c.float() for c in held] for held in (cache.keys, cache.values))
    whole = PagedCache(*caches, wide.rope_tables(1024))  # type: ignore[call-arg]
    return wide.logits(wide.forward_decode(ids, positions, whole, b.slots, b.tables, b.lengths))


def time_step(shape: dict[str, Any], batch: int) -> None:
    model = build(shape)
    b = Batch(shape, batch, 512, 640)
    decoder = FusedDecoder(model)
    layers = range(shape["num_hidden_layers"])
    cache = PagedCache([b.cache() for _ in layers], [b.cache() for _ in layers], decoder.rope_tables(1024))
    ids = torch.randint(0, shape["vocab_size"], (batch,), device=DEVICE)
    positions = b.lengths.long() - 1
    sample, few = kernel("sample", DEVICE), torch.zeros(batch, dtype=torch.bool, device=DEVICE)
    ones, seeds = torch.ones(batch, device=DEVICE), ints(range(batch), torch.int64)
    weights = sum(p.nbytes for p in model.parameters())
    moved = weights + b.kv_bytes * len(layers)
    stock = stock_step(model, b, cache, ids, positions)

    def fused(_: int) -> torch.Tensor:
        return decoder.logits(decoder.forward_decode(ids, positions, cache, b.slots, b.tables, b.lengths))

    exact = exactly(model, b, cache, ids, positions)
    # bf16 layers round: the fused forward may not be further off than the stock one.
    check("fused logits against fp32", fused(0), exact, 1.25 * error(stock(0), exact))
    del exact
    row("step: stock forward, our attention", graph_us(stock, 1), moved)
    row("step: fused forward", graph_us(fused, 1), moved)
    row("step: fused forward and sampling", graph_us(lambda i: sample(fused(0), ones, seeds, positions, few), 1), moved)
    groups = PrefixGroups(
        b.tables[::8, :32].contiguous(), ints([512] * (batch // 8)), ints(range(0, batch + 1, 8)), ints(range(batch)), 8
    )
    tails = (b.tables[:, 32:].contiguous(), (b.lengths - 512).clamp(min=1))

    def shared(_: int) -> torch.Tensor:
        return decoder.forward_decode(ids, positions, cache, b.slots, *tails, groups)

    row("step: fused, 32 groups sharing 512, no head", graph_us(shared, 1), moved)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=[*MODELS, "both"], default="both", help="model shape")
    parser.add_argument("--batch", type=int, default=256, help="requests per decode step")
    parser.add_argument("--tune", action="store_true", help="try other tile sizes")
    parser.add_argument("--skip-checks", action="store_true", help="skip the comparison with plain torch")
    args = parser.parse_args()
    import triton

    say(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__, "load", os.getloadavg())
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    if not args.skip_checks:
        for dtype, bound in ((torch.bfloat16, 1e-2), (torch.float32, 1e-5)):
            for test in (check_attention, check_shared, check_rest):
                with part(f"{test.__name__} {dtype}"):
                    test(dtype, bound)
    for name in MODELS if args.shape == "both" else [args.shape]:
        say(f"{name}, {args.batch} requests of 512..640 keys, bf16")
        with part(f"attention {name}"):
            time_attention(MODELS[name], args.batch, args.tune)
        torch.cuda.empty_cache()
        with part(f"the rest {name}"):
            time_rest(MODELS[name], args.batch)
        torch.cuda.empty_cache()
        with part(f"whole step {name}"):
            time_step(MODELS[name], args.batch)
        torch.cuda.empty_cache()
    say(f"{len(WRONG)} checks out of bounds: {', '.join(WRONG)}" if WRONG else "every check within its bound")


if __name__ == "__main__":
    main()
