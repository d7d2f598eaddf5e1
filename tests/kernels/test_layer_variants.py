"""Kernels of layers that differ from Llama's, against definitions in float64: sliding windows, soft caps, rope over a
part of each head, heads of any size, other norms. Plain torch on the CPU, and on a GPU Triton too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from toolwise.kernels import kernel
from toolwise.kernels.new_tokens import NewTokens

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
DTYPES = [torch.float32, torch.bfloat16]
BLOCK, BLOCKS, EPS = 16, 24, 1e-5


@dataclass(frozen=True)
class Variant:
    size: int
    window: int | None = None
    softcap: float | None = None
    rotary: int | None = None
    """Elements of each head that are rotated; all if None."""
    norm: bool = False
    plus_one: bool = False
    heads: int = 4
    key_heads: int = 2

    @property
    def scale(self) -> float:
        return float(1.5 * self.size**-0.5)

    @property
    def formula(self) -> dict[str, Any]:
        return {"scale": self.scale, "window": self.window, "softcap": self.softcap}


VARIANTS = {
    "plain": Variant(64),
    "window": Variant(64, window=5),
    "window of a token": Variant(32, window=1),
    "window over many tiles": Variant(32, window=70),
    "window beyond the text": Variant(32, window=4000),
    "soft cap": Variant(32, softcap=1.5),
    "small heads": Variant(8, window=20),
    "heads of 80, partial rope": Variant(80, rotary=32, key_heads=4),
    "heads of 96 in a window": Variant(96, window=20, key_heads=1),
    "heads of 128, partial rope": Variant(128, rotary=96, heads=3, key_heads=1),
    "no rope, normed heads": Variant(80, rotary=0, norm=True),
    "Gemma 2": Variant(256, window=20, softcap=1.5),
    "Gemma 3": Variant(256, window=20, norm=True, plus_one=True, key_heads=1),
}


@dataclass
class Data:
    """Random inputs of a variant in one precision on one device, and their values in float64."""

    variant: Variant
    dtype: torch.dtype
    device: str

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        shape = (BLOCKS, BLOCK, self.variant.key_heads, self.variant.size)
        self.keys, self.values = self.randn(*shape), self.randn(*shape)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape).to(self.device, self.dtype)

    def ints(self, values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def qkv(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Slices of one tensor, as a fused projection gives them."""
        v = self.variant
        rows = self.randn(tokens, v.heads + 2 * v.key_heads, v.size)
        return rows[:, : v.heads], rows[:, v.heads : -v.key_heads], rows[:, -v.key_heads :]

    def angles(self, tokens: int) -> tuple[Tensor, Tensor]:
        size = self.variant.size if self.variant.rotary is None else self.variant.rotary
        return self.randn(tokens, size), self.randn(tokens, size)

    def head_norms(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        return (self.randn(self.variant.size), self.randn(self.variant.size)) if self.variant.norm else (None, None)

    def close(self, found: Tensor, wanted: Tensor) -> None:
        bound = 1e-4 if self.dtype == torch.float32 else 0.04
        torch.testing.assert_close(found.double().cpu(), wanted, rtol=bound, atol=bound)


def exact(x: Tensor) -> Tensor:
    return x.double().cpu()


def paged(cache: Tensor, table: list[int], length: int) -> Tensor:
    return exact(cache)[torch.tensor(table)].flatten(0, 1)[:length]


def attended(q: Tensor, k: Tensor, v: Tensor, variant: Variant) -> Tensor:
    """One query [H, D], the last of the positions of k, v [n, KVH, D], head by head."""
    k, v = k[-(variant.window or len(k)) :], v[-(variant.window or len(v)) :]
    out = []
    for head, query in enumerate(q):
        own = head * variant.key_heads // variant.heads
        scores = variant.scale * k[:, own] @ query
        if variant.softcap is not None:
            scores = variant.softcap * torch.tanh(scores / variant.softcap)
        out.append(scores.softmax(0) @ v[:, own])
    return torch.stack(out)


def normed(x: Tensor, weight: Tensor | None, plus_one: bool) -> Tensor:
    if weight is None:
        return x
    return (exact(weight) + plus_one) * x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[T, heads, D]: pairs (x_i, x_{i + R/2}) of the first R elements."""
    half = cos.shape[-1] // 2
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = exact(cos)[:, None], exact(sin)[:, None]
    turned = first * cos[..., :half] - second * sin[..., :half], second * cos[..., half:] + first * sin[..., half:]
    return torch.cat([*turned, rest], -1)


def slot(table: list[int], position: int) -> int:
    return table[position // BLOCK] * BLOCK + position % BLOCK


each = pytest.mark.parametrize("device", DEVICES)
precisions = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
variants = pytest.mark.parametrize("name", VARIANTS)

LENGTHS, TABLES = [1, 19, 77, 0], [[3] + [0] * 4, [5, 1, 0, 0, 0], [2, 4, 6, 8, 10], [0] * 5]
"""Keys of each request with its new token; the last is done and only pads the step."""


@each
@precisions
@variants
@pytest.mark.parametrize("splits", [None, 1])
def test_decode(name: str, splits: int | None, dtype: torch.dtype, device: str) -> None:
    """Keys in the cache, then with new tokens that are normed, rotated and stored first."""
    variant, data = VARIANTS[name], Data(VARIANTS[name], dtype, device)
    q, k, v = data.qkv(len(LENGTHS))
    decode = kernel("paged_attention_decode", device)
    in_torch = decode.__module__.endswith("torch_reference")
    options = variant.formula | ({} if splits is None or in_torch else {"splits": splits})
    args = data.ints(TABLES), data.ints(LENGTHS)
    found = decode(q, data.keys, data.values, *args, **options)
    for row, (table, length) in enumerate(list(zip(TABLES, LENGTHS, strict=True))[:-1]):
        held = paged(data.keys, table, length), paged(data.values, table, length)
        data.close(found[row], attended(exact(q[row]), *held, variant))
    slots = [slot(table, n - 1) if n else -1 for table, n in zip(TABLES, LENGTHS, strict=True)]
    (cos, sin), weights = data.angles(len(LENGTHS)), data.head_norms()
    new = NewTokens(k, v, cos, sin, data.ints(slots, torch.int64), *weights, EPS, variant.plus_one)
    found = decode(q, data.keys, data.values, *args, new=new, **options)
    queries, keys = (
        rotated(normed(exact(x), weight, variant.plus_one), cos, sin) for x, weight in zip((q, k), weights, strict=True)
    )
    for row, (table, length) in enumerate(list(zip(TABLES, LENGTHS, strict=True))[:-1]):
        data.close(data.keys.flatten(0, 1)[slots[row]], keys[row])
        data.close(data.values.flatten(0, 1)[slots[row]], exact(v[row]))
        held = paged(data.keys, table, length), paged(data.values, table, length)
        data.close(found[row], attended(queries[row], *held, variant))


@each
@precisions
@variants
def test_decode_over_shared_prefixes(name: str, dtype: torch.dtype, device: str) -> None:
    """Tails of one token, whose window begins in the prefix, beside tails that are longer than it."""
    variant, data = VARIANTS[name], Data(VARIANTS[name], dtype, device)
    prefixes, prefix_lengths = [[1, 2, 3, 4, 5], [6, 0, 0, 0, 0], [0] * 5], [80, 16, 0]
    starts, members = [0, 4, 5, 6], [4, 0, 2, 5, 1, 3]
    tails = [1, 18, 7, 21, 30, 0]
    """The last request is done."""
    tables = [[8 + 2 * row, 9 + 2 * row] for row in range(6)]
    group_of = {row: group for group in range(3) for row in members[starts[group] : starts[group + 1]]}
    slots = [slot(table, n - 1) if n else -1 for table, n in zip(tables, tails, strict=True)]
    (q, k, v), (cos, sin), weights = data.qkv(6), data.angles(6), data.head_norms()
    new = NewTokens(k, v, cos, sin, data.ints(slots, torch.int64), *weights, EPS, variant.plus_one)
    shared = (data.ints(prefixes), data.ints(prefix_lengths), data.ints(starts), data.ints(members), 4)
    found = kernel("shared_prefix_decode", device)(
        q, data.keys, data.values, *shared, data.ints(tables), data.ints(tails), new=new, **variant.formula
    )
    queries = rotated(normed(exact(q), weights[0], variant.plus_one), cos, sin)
    for row in range(5):
        group = group_of[row]
        held = [
            torch.cat([paged(x, prefixes[group], prefix_lengths[group]), paged(x, tables[row], tails[row])])
            for x in (data.keys, data.values)
        ]
        data.close(found[row], attended(queries[row], *held, variant))


@each
@precisions
@variants
def test_prefill(name: str, dtype: torch.dtype, device: str) -> None:
    """The last 3 of 19 tokens, none of 40, and 150 of 200: several tiles of queries and of keys."""
    variant, data = VARIANTS[name], Data(VARIANTS[name], dtype, device)
    tables, contexts, counts = [[5, 1], [2, 3, 4], list(range(6, 19))], [19, 40, 200], [3, 0, 150]
    starts = [0, 3, 3, 153]
    q, _, _ = data.qkv(153)
    found = kernel("paged_attention_prefill", device)(
        q, data.keys, data.values, data.ints([[*table, *[0] * (13 - len(table))] for table in tables]),
        data.ints(starts), data.ints(contexts), max_query_length=150, **variant.formula,
    )  # fmt: skip
    for table, context, count, start in zip(tables, contexts, counts, starts[:-1], strict=True):
        k, v = paged(data.keys, table, context), paged(data.values, table, context)
        for i in range(0, count, 7 if count > 7 else 1):
            seen = context - count + i + 1
            data.close(found[start + i], attended(exact(q[start + i]), k[:seen], v[:seen], variant))


@each
@precisions
@variants
def test_rope_and_store(name: str, dtype: torch.dtype, device: str) -> None:
    variant, data = VARIANTS[name], Data(VARIANTS[name], dtype, device)
    (q, k, v), (cos, sin), weights = data.qkv(3), data.angles(3), data.head_norms()
    before = exact(data.keys)
    queries, keys = (
        rotated(normed(exact(x), weight, variant.plus_one), cos, sin) for x, weight in zip((q, k), weights, strict=True)
    )
    kernel("rope_and_store", device)(
        q, k, v, cos, sin, data.keys, data.values, data.ints([5, -1, 40], torch.int64),
        q_weight=weights[0], k_weight=weights[1], eps=EPS, plus_one=variant.plus_one,
    )  # fmt: skip
    data.close(q, queries)
    data.close(k, keys)
    before.flatten(0, 1)[[5, 40]] = keys[[0, 2]]
    data.close(data.keys, before)
    data.close(data.values.flatten(0, 1)[[5, 40]], exact(v[[0, 2]]))


@each
@precisions
@pytest.mark.parametrize("plus_one", [False, True])
def test_a_norm_in_place_changes_its_slice_alone(plus_one: bool, dtype: torch.dtype, device: str) -> None:
    data = Data(VARIANTS["plain"], dtype, device)
    rows, weight = data.randn(5, 200), data.randn(120)
    before = exact(rows)
    kernel("rms_norm", device)(rows[:, 40:160], weight, EPS, plus_one=plus_one, in_place=True)
    wanted = torch.cat([before[:, :40], normed(before[:, 40:160], weight, plus_one), before[:, 160:]], -1)
    data.close(rows, wanted)


@each
@precisions
@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.4])
def test_a_residual_is_added_between_two_norms(
    scale: float, before: bool, after: bool, plus_one: bool, dtype: torch.dtype, device: str
) -> None:
    data = Data(VARIANTS["plain"], dtype, device)
    x, residual, weight, after_weight = data.randn(5, 120), data.randn(5, 120), data.randn(120), data.randn(120)
    found, new_residual = kernel("add_rms_norm", device)(
        x, residual, weight if before else None, EPS,
        plus_one=plus_one, after=after_weight if after else None, scale=scale,
    )  # fmt: skip
    wanted = exact(residual) + scale * normed(exact(x), after_weight if after else None, plus_one)
    data.close(new_residual, wanted)
    data.close(found, normed(wanted, weight if before else None, plus_one))
