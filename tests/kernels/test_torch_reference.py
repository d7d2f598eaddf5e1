"""Every kernel against its definition, written out in float64: plain torch on the CPU, and on a GPU Triton too."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from toolwise import kernels
from toolwise.kernels import kernel
from toolwise.kernels.new_tokens import NewTokens

HEADS, KEY_HEADS, SIZE, BLOCK, SCALE, EPS = 4, 2, 32, 16, 0.2, 1e-5
LENGTHS = [1, 19, 0, 32]
"""Keys of each request; the third is done and only pads the step."""
TABLES = [[3, 0], [5, 1], [0, 0], [2, 4]]
Results = list[Tensor]
Case = tuple[list[Any], Callable[[Any, list[Any]], Results], Results]
"""Arguments, the results of a call given what it returned and its arguments, and what they must be."""


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def ints(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def returned(value: Any, _: list[Any]) -> Results:
    return [value] if isinstance(value, Tensor) else list(value)


def modified(*indices: int) -> Callable[[Any, list[Any]], Results]:
    return lambda _, args: [args[index] for index in indices]


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt()


def rms_norm() -> Case:
    x, weight = randn(5, 48), randn(48)
    return [x, weight, EPS], returned, [norm(x, weight)]


def add_rms_norm() -> Case:
    x, residual, weight = randn(5, 48), randn(5, 48), randn(48)
    return [x, residual, weight, EPS], returned, [norm(x + residual, weight), x + residual]


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def silu_mul() -> Case:
    gate, up = randn(5, 48), randn(5, 48)
    return [torch.cat([gate, up], -1)], returned, [silu(gate) * up]


def gelu_tanh_mul() -> Case:
    gate, up = randn(5, 48), randn(5, 48)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return [torch.cat([gate, up], -1)], returned, [gate * (1 + torch.tanh(inner)) / 2 * up]


def silu_mul_backward() -> Case:
    gate, up, grad = randn(5, 48).requires_grad_(), randn(5, 48).requires_grad_(), randn(5, 48)
    wanted = torch.autograd.grad((silu(gate) * up * grad).sum(), [gate, up])
    return [gate.detach(), up.detach(), grad], returned, list(wanted)


def gated_silu_backward() -> Case:
    gate_up, grad = randn(5, 96).requires_grad_(), randn(5, 48)
    gate, up = gate_up.chunk(2, -1)
    wanted = torch.autograd.grad((silu(gate) * up * grad).sum(), [gate_up])
    return [gate_up.detach(), grad], returned, list(wanted)


def rms_norm_backward() -> Case:
    x, weight, grad, grad_total = randn(5, 48).requires_grad_(), randn(48).requires_grad_(), randn(5, 48), randn(5, 48)
    normed = weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()
    wanted = torch.autograd.grad((normed * grad).sum() + (x * grad_total).sum(), [x, weight])
    return [grad, x.detach(), weight.detach(), 1e-3, grad_total], returned, list(wanted)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The pair (x_i, x_{i + D/2}) of each head, turned by a matrix."""
    result, half = torch.empty_like(x), x.shape[-1] // 2
    for t in range(x.shape[0]):
        for i in range(half):
            a, b = x[t, :, i], x[t, :, i + half]
            result[t, :, i] = a * cos[t, i] - b * sin[t, i]
            result[t, :, i + half] = b * cos[t, i + half] + a * sin[t, i + half]
    return result


def rotate() -> Case:
    x, cos, sin = randn(5, HEADS, SIZE), randn(5, SIZE), randn(5, SIZE)
    return [x, cos, sin], returned, [rope(x, cos, sin)]


def merge() -> Case:
    values, weights = (
        randn(10, 3, HEADS, SIZE),
        randn(10, HEADS, 3),
    )  # keys × tokens × heads × size, keys × heads × tokens

    def attended(keys: slice) -> tuple[Tensor, Tensor]:
        shares = weights[keys].softmax(0).permute(0, 2, 1)
        return (shares[..., None] * values[keys]).sum(0), torch.logsumexp(weights[keys], 0)

    (first, first_lse), (second, second_lse), both = (attended(slice(*ends)) for ends in ((0, 6), (6, 10), (0, 10)))
    return [first, first_lse, second, second_lse, ints([0, 1, 2], torch.int64)], modified(0, 1), list(both)


def caches() -> tuple[Tensor, Tensor]:
    return randn(6, BLOCK, KEY_HEADS, SIZE), randn(6, BLOCK, KEY_HEADS, SIZE)


def store_kv() -> Case:
    (k_cache, v_cache), k, v = caches(), randn(3, KEY_HEADS, SIZE), randn(3, KEY_HEADS, SIZE)
    wanted = [k_cache.clone(), v_cache.clone()]
    for new, cache in zip((k, v), wanted, strict=True):
        cache[2, 5], cache[0, 0] = new[0], new[2]
    slots = ints([2 * BLOCK + 5, -1, 0], torch.int64)  # -1 pads
    return [k, v, k_cache, v_cache, slots], modified(2, 3), wanted


def rope_and_store() -> Case:
    (k_cache, v_cache), q = caches(), randn(2, HEADS, SIZE)
    k, v, cos, sin = randn(2, KEY_HEADS, SIZE), randn(2, KEY_HEADS, SIZE), randn(2, SIZE), randn(2, SIZE)
    wanted = [rope(q, cos, sin), rope(k, cos, sin), k_cache.clone(), v_cache.clone()]
    wanted[2][4, 1], wanted[3][4, 1] = wanted[1][1], v[1]
    wanted[2][1, 7], wanted[3][1, 7] = wanted[1][0], v[0]
    slots = ints([BLOCK + 7, 4 * BLOCK + 1], torch.int64)
    return [q, k, v, cos, sin, k_cache, v_cache, slots], modified(0, 1, 5, 6), wanted


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One query [H, D] over keys and values [n, KVH, D], head by head; 0 without keys."""
    out = torch.zeros(HEADS, SIZE, dtype=torch.float64)
    for head in range(HEADS if len(k) else 0):
        own = head // (HEADS // KEY_HEADS)
        weights = torch.tensor([math.exp(SCALE * float(q[head] @ key[own])) for key in k], dtype=torch.float64)
        out[head] = sum(w * value[own] for w, value in zip(weights / weights.sum(), v, strict=True))
    return out


def paged(cache: Tensor, table: list[int], length: int) -> Tensor:
    return torch.stack([cache[table[i // BLOCK], i % BLOCK] for i in range(length)]) if length else cache[0, :0]


def paged_attention_decode() -> Case:
    (k_cache, v_cache), q = caches(), randn(len(LENGTHS), HEADS, SIZE)
    rows = zip(q, TABLES, LENGTHS, strict=True)
    wanted = [attend(x, paged(k_cache, table, n), paged(v_cache, table, n)) for x, table, n in rows]
    args = [q, k_cache, v_cache, ints(TABLES), ints(LENGTHS), SCALE]
    return (
        args,
        lambda out, _: [out[ints(LENGTHS).bool()]],
        [torch.stack([w for w, n in zip(wanted, LENGTHS, strict=True) if n])],
    )


def shared_prefix_decode() -> Case:
    """Requests 2 and 0 share two blocks, request 1 shares nothing."""
    (k_cache, v_cache), q = caches(), randn(3, HEADS, SIZE)
    prefix, tails, counts = [[4, 5], [0, 0]], [[0, 0], [1, 2], [3, 0]], [7, 20, 1]
    wanted = []
    for row, has_prefix in enumerate((True, False, True)):
        keys, values = (
            torch.cat([paged(cache, prefix[0], 32 if has_prefix else 0), paged(cache, tails[row], counts[row])])
            for cache in (k_cache, v_cache)
        )
        wanted.append(attend(q[row], keys, values))
    groups = [ints(prefix), ints([32, 0]), ints([0, 2, 3]), ints([2, 0, 1]), 2]
    return [q, k_cache, v_cache, *groups, ints(tails), ints(counts), SCALE], returned, [torch.stack(wanted)]


def paged_attention_prefill() -> Case:
    """The last 3 of 19 tokens of one prompt, and all 5 of another."""
    (k_cache, v_cache), q = caches(), randn(8, HEADS, SIZE)
    tables, contexts, starts = [[5, 1], [2, 0]], [19, 5], [0, 3, 8]
    wanted = []
    for row, (table, context) in enumerate(zip(tables, contexts, strict=True)):
        count = starts[row + 1] - starts[row]
        for i in range(count):
            seen = context - count + i + 1
            wanted.append(attend(q[starts[row] + i], paged(k_cache, table, seen), paged(v_cache, table, seen)))
    return [q, k_cache, v_cache, ints(tables), ints(starts), ints(contexts), SCALE, 5], returned, [torch.stack(wanted)]


def softmax_sums() -> Case:
    logits, scale = 3 * randn(4, 70), 1.4
    p = (scale * logits).softmax(-1)
    return [logits, scale], returned, [(scale * logits).exp().sum(-1).log(), -(p * p.log()).sum(-1)]


def softmax_sums_backward() -> Case:
    logits, scale, a, b = (3 * randn(3, 70)).requires_grad_(), 1.4, randn(4), randn(4)
    row_index, targets = ints([0, 0, 2, 2], torch.int64), ints([4, 4, 0, 69], torch.int64)
    logp = (scale * logits).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    (wanted,) = torch.autograd.grad((a * logp[row_index, targets] + b * entropy[row_index]).sum() / scale, logits)
    lse = torch.logsumexp(scale * logits.detach(), -1)
    return [logits.detach(), scale, lse, entropy.detach(), row_index, targets, a, b], returned, [wanted]


def uniform(seed: int, position: int) -> float:
    """splitmix64, twice."""

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    state = mix((seed + 0x9E3779B97F4A7C15) % 2**64)
    return (mix(state ^ ((position + 1) * 0xD1342543DE82EF95 % 2**64)) >> 11) * 2.0**-53


def sample() -> Case:
    """The first token whose cumulative probability exceeds the uniform number of (seed, position); or the likeliest."""
    logits, temperatures, greedy = 3 * randn(12, 70), torch.linspace(0.5, 2, 12, dtype=torch.float64), [True, False] * 6
    seeds, positions = [7 * i - 2 for i in range(12)], [3 * i for i in range(12)]
    tokens, logprobs = [], []
    for row, p in enumerate((logits / temperatures[:, None]).softmax(-1).tolist()):
        goal, token, total = uniform(seeds[row], positions[row]), 0, p[0]
        while total <= goal:
            token += 1
            total += p[token]
        tokens.append(max(range(70), key=p.__getitem__) if greedy[row] else token)
        logprobs.append(math.log(p[tokens[-1]]))
    numbers = [ints(seeds, torch.int64), ints(positions, torch.int64), ints(greedy, torch.bool)]
    return [logits, temperatures, *numbers], returned, [ints(tokens, torch.int64), torch.tensor(logprobs)]


def norm_linear() -> Case:
    """act(gate) · up for [gate, up] = x / √(mean of the squares + ε) Wᵀ + b."""
    x, weight, bias, squares = randn(5, 24), randn(2 * 20, 24), randn(2 * 20), randn(5, 3) ** 2
    factor = (squares.sum(1, keepdim=True) / 24 + EPS).rsqrt()
    gate, up = (x * factor @ weight.T + bias).chunk(2, -1)
    return [x, weight, bias, squares, EPS, "silu"], returned, [gate / (1 + (-gate).exp()) * up]


def linear_add() -> Case:
    x, weight, bias, residual, gain = randn(5, 24), randn(20, 24), randn(20), randn(5, 20), randn(20)
    total = residual + x @ weight.T + bias

    def sums(found: Any, args: Any) -> Any:
        return [*found[:2], found[2].sum(1)]

    return [x, weight, bias, residual, gain], sums, [total, total * gain, (total**2).sum(1)]


def begin_step() -> Case:
    """The second row has a prefix of one block; the third is not active."""
    tables = ints([[7, 9], [4, 0], [3, 2]])
    fields = [
        ints([BLOCK + 2, 2 * BLOCK - 1, 5], torch.int64),
        ints([0, BLOCK, 0], torch.int64),
        ints([1, 1, 0], torch.int64),
    ]
    slots = ints([9 * BLOCK + 2, 4 * BLOCK + BLOCK - 1, -1], torch.int64)
    return [*fields, tables, BLOCK], returned, [slots, ints([BLOCK + 3, BLOCK, 0])]


def end_step() -> Case:
    """Rows that go on, sampled a stop token, reached their limit, and were not active."""
    tokens, logprobs, stops = ints([11, 12, 13, 14], torch.int64), randn(4), ints([[-1, 5], [5, 12]] * 2, torch.int64)
    ids, positions, sampled = [
        ints([1, 2, 3, 4], torch.int64),
        ints([8] * 4, torch.int64),
        ints([0, 1, 2, 3], torch.int64),
    ]
    limits, active = ints([9, 9, 3, 9], torch.int64), ints([1, 1, 1, 0], torch.int64)
    step, all_tokens, all_logprobs = ints([1], torch.int64), torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, 4)
    wanted_tokens, wanted_logprobs = all_tokens.clone(), all_logprobs.double()
    wanted_tokens[1], wanted_logprobs[1] = ints([11, 12, 13, -1], torch.int64), logprobs
    wanted = [
        ints([11, 12, 13, 4], torch.int64), ints([9, 9, 9, 8], torch.int64), ints([1, 2, 3, 3], torch.int64),
        ints([1, 0, 0, 0], torch.int64), ints([2], torch.int64), wanted_tokens, wanted_logprobs,
    ]  # fmt: skip

    def written(found: Any, args: Any) -> Any:
        return [*args[3:6], *args[7:]]

    return (
        [tokens, logprobs, stops, ids, positions, sampled, limits, active, step, all_tokens, all_logprobs],
        written,
        wanted,
    )


CASES: dict[str, Callable[[], Case]] = {
    function.__name__: function
    for function in (
        add_rms_norm, begin_step, end_step, gated_silu_backward, gelu_tanh_mul, linear_add, merge, norm_linear,
        paged_attention_decode, paged_attention_prefill, rms_norm, rms_norm_backward, rope_and_store, rotate, sample,
        shared_prefix_decode, silu_mul, silu_mul_backward, softmax_sums, softmax_sums_backward, store_kv,
    )
}  # fmt: skip
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def test_every_kernel_has_a_definition() -> None:
    assert set(CASES) == set(kernels._MODULES)


def single(value: Any, device: str) -> Any:
    """Tensors in single precision on `device`, contiguous copies."""
    if not isinstance(value, Tensor):
        return value
    return value.to(device, torch.float32 if value.is_floating_point() else value.dtype).clone().contiguous()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_computes_its_definition(name: str, device: str) -> None:
    torch.manual_seed(0)
    args, results, wanted = CASES[name]()
    own = [single(value, device) for value in args]
    found = results(kernel(name, device)(*own), own)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.cpu().to(theirs.dtype), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shared", [False, True])
def test_new_tokens_are_normalized_rotated_and_stored_first(shared: bool, device: str) -> None:
    torch.manual_seed(0)
    (k_cache, v_cache), q = caches(), randn(2, HEADS, SIZE)
    new = NewTokens(
        randn(2, KEY_HEADS, SIZE), randn(2, KEY_HEADS, SIZE), randn(2, SIZE), randn(2, SIZE),
        ints([5 * BLOCK + 2, BLOCK], torch.int64), randn(SIZE), randn(SIZE), EPS,
    )  # fmt: skip
    assert new.q_weight is not None
    assert new.k_weight is not None
    tables, lengths = [[5, 0], [4, 1]], [3, 17]
    own = [single(value, device) for value in (q, k_cache, v_cache)]
    own_new = replace(new, **{name: single(value, device) for name, value in vars(new).items()})
    queries, keys = rope(norm(q, new.q_weight), new.cos, new.sin), rope(norm(new.k, new.k_weight), new.cos, new.sin)
    for row, (block, place) in enumerate(((5, 2), (1, 0))):
        k_cache[block, place], v_cache[block, place] = keys[row], new.v[row]
    wanted = torch.stack(
        [
            attend(queries[row], paged(k_cache, tables[row], n), paged(v_cache, tables[row], n))
            for row, n in enumerate(lengths)
        ]
    )
    ends = [single(ints(value), device) for value in (tables, lengths)]
    if shared:
        alone = [ints([[0], [0]]), ints([0, 0]), ints([0, 1, 2]), ints([0, 1])]
        groups = [*(single(value, device) for value in alone), 1]
        found = kernel("shared_prefix_decode", device)(*own, *groups, *ends, SCALE, new=own_new)
    else:
        found = kernel("paged_attention_decode", device)(*own, *ends, SCALE, new=own_new)
    for ours, theirs in zip((found, *own[1:]), (wanted, k_cache, v_cache), strict=True):
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=1e-4, atol=1e-5)
