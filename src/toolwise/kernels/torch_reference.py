"""The kernels in plain torch: the reference for tests, and the implementation without a GPU."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from toolwise.kernels.new_tokens import NewTokens
from toolwise.models.dense_attention import dense_attention


def gather(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` keys (or values) of a block table, [length, KVH, D]."""
    block = cache.shape[1]
    return cache[table[: -(-length // block)].long()].flatten(0, 1)[:length]


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None, softcap: float | None
) -> torch.Tensor:
    """q[n, H, D], the last n of the c positions of k, v[c, KVH, D]."""
    n, heads, _ = q.shape
    k, v = (x if window is None else x[-(window + n - 1) :] for x in (k, v))
    distance = torch.arange(len(k) - n, len(k), device=q.device)[:, None] - torch.arange(len(k), device=q.device)
    mask = torch.zeros(distance.shape, dtype=q.dtype, device=q.device)
    mask.masked_fill_((distance < 0) | (distance >= (window or len(k))), -torch.inf)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    if softcap is None:
        k, v = (x.repeat_interleave(heads // len(x), 0) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask if n > 1 else None, scale=scale).transpose(0, 1)
    return dense_attention(q, k, v, mask, scale=scale, softcap=softcap).transpose(0, 1)


def paged_attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    *,
    new: NewTokens | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    q = q if new is None else _rope_and_store_new(q, new, k_cache, v_cache)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    for row, length in enumerate(lengths.tolist()):
        if length:
            k, v = (gather(cache, block_tables[row], length) for cache in (k_cache, v_cache))
            out[row] = _attention(q[row : row + 1], k, v, scale, window, softcap)[0]
    return out


def shared_prefix_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    prefix_tables: torch.Tensor,
    prefix_lengths: torch.Tensor,
    member_starts: torch.Tensor,
    members: torch.Tensor,
    max_members: int,
    tail_tables: torch.Tensor,
    tail_lengths: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    *,
    new: NewTokens | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    q = q if new is None else _rope_and_store_new(q, new, k_cache, v_cache)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    starts, tails = member_starts.tolist(), tail_lengths.tolist()
    for group, length in enumerate(prefix_lengths.tolist()):
        for row in members[starts[group] : starts[group + 1]].tolist():
            k, v = (
                torch.cat([gather(c, prefix_tables[group], length), gather(c, tail_tables[row], tails[row])])
                for c in (k_cache, v_cache)
            )
            if len(k):
                out[row] = _attention(q[row : row + 1], k, v, scale, window, softcap)[0]
    return out


def paged_attention_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lengths: torch.Tensor,
    scale: float,
    max_query_length: int | None = None,
    out: torch.Tensor | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    starts = query_starts.tolist()
    for row, length in enumerate(context_lengths.tolist()):
        chunk = slice(starts[row], starts[row + 1])
        if chunk.start < chunk.stop:
            k, v = (gather(cache, block_tables[row], length) for cache in (k_cache, v_cache))
            out[chunk] = _attention(q[chunk], k, v, scale, window, softcap)
    return out


def store_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    real = slots >= 0
    k_cache.flatten(0, 1)[slots[real]] = k[real]
    v_cache.flatten(0, 1)[slots[real]] = v[real]


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def rope_and_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    plus_one: bool = False,
) -> None:
    for x, weight in ((q, q_weight), (k, k_weight)):
        straight = x if weight is None else rms_norm(x, weight, eps, plus_one=plus_one)
        turned, rest = straight[..., : cos.shape[-1]], straight[..., cos.shape[-1] :]
        x.copy_(torch.cat([turned * cos[:, None] + _rotate_half(turned) * sin[:, None], rest], -1))
    store_kv(k, v, k_cache, v_cache, slots)


def _rope_and_store_new(q: torch.Tensor, new: NewTokens, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
    """Write the new tokens to the cache and return the rotated queries."""
    q, k = q.clone(), new.k.clone()
    rope_and_store(
        q, k, new.v, new.cos, new.sin, k_cache, v_cache, new.slots,
        q_weight=new.q_weight, k_weight=new.k_weight, eps=new.eps, plus_one=new.plus_one,
    )  # fmt: skip
    return q


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, back: bool = False, out: torch.Tensor | None = None
) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    (first, second), (c1, c2), (s1, s2) = (
        t.to(wide).chunk(2, dim=-1) for t in (x, cos[:, None], sin[:, None])
    )  # fmt: skip
    if back:
        rotated = [first * c1 + second * s2, second * c2 - first * s1]
    else:
        rotated = [first * c1 - second * s1, second * c2 + first * s2]
    result = torch.cat(rotated, dim=-1).to(x.dtype)
    return result if out is None else out.copy_(result)


def merge(
    out: torch.Tensor,
    lse: torch.Tensor,
    new_out: torch.Tensor,
    new_lse: torch.Tensor,
    token_index: torch.Tensor | slice,
) -> None:
    before = lse[:, token_index]
    total = torch.logaddexp(before, new_lse)
    old_weight, new_weight = (torch.exp(part - total).t()[:, :, None] for part in (before, new_lse))
    out[token_index] = (out[token_index] * old_weight + new_out * new_weight).to(out.dtype)
    lse[:, token_index] = total


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False, in_place: bool = False
) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed = (wide * (1.0 + weight.float())).to(x.dtype) if plus_one else weight * wide.to(x.dtype)
    return x.copy_(normed) if in_place else normed


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    plus_one: bool = False,
    after: torch.Tensor | None = None,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    x = x if after is None else rms_norm(x, after, eps, plus_one=plus_one)
    residual = residual + (x if scale == 1.0 else x * scale)
    return residual if weight is None else rms_norm(residual, weight, eps, plus_one=plus_one), residual


def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, grad_total: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide, dy = x.to(dtype), grad.to(dtype)
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed, scaled = wide * inverse, dy * weight.to(dtype)
    grad_x = inverse * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    grad_x = grad_x if grad_total is None else grad_x + grad_total
    return grad_x.to(x.dtype), (dy * normed).sum(0).to(weight.dtype)


def silu_mul(gate_up: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1) if up is None else (gate_up, up)
    return F.silu(gate) * up


def gelu_tanh_mul(gate_up: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1) if up is None else (gate_up, up)
    return F.gelu(gate, approximate="tanh") * up


def silu_mul_backward(gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)


def gated_silu_backward(gate_up: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.cat(silu_mul_backward(gate, up, grad), dim=-1)


def softmax_sums(logits: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    x = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    lse = torch.logsumexp(x, -1)
    logp = x - lse[:, None]
    return lse, -(logp.exp() * logp.clamp(min=torch.finfo(x.dtype).min)).sum(-1)


def softmax_sums_backward(
    logits: torch.Tensor,
    scale: float,
    lse: torch.Tensor,
    entropy: torch.Tensor,
    row_index: torch.Tensor,
    targets: torch.Tensor,
    grad_logprob: torch.Tensor,
    grad_entropy: torch.Tensor,
) -> torch.Tensor:
    logp = logits.to(lse.dtype) * scale - lse[:, None]
    p = logp.exp()
    a, b = (torch.zeros_like(lse).index_add_(0, row_index, part.to(lse.dtype)) for part in (grad_logprob, grad_entropy))
    grad = -p * (a[:, None] + b[:, None] * torch.where(p == 0.0, 0.0, logp + entropy[:, None]))
    return grad.index_put_((row_index, targets), grad_logprob.to(lse.dtype), accumulate=True).to(logits.dtype)


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`engine/sampler.py`'s `uniforms` on int64 tensors, where products wrap around and shifts are arithmetic."""

    def signed(constant: int) -> int:
        return constant - (1 << 64) if constant >> 63 else constant

    def shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
        return (x >> bits) & ((1 << (64 - bits)) - 1)

    def mixed(x: torch.Tensor) -> torch.Tensor:
        x = (x ^ shifted(x, 30)) * signed(0xBF58476D1CE4E5B9)
        x = (x ^ shifted(x, 27)) * signed(0x94D049BB133111EB)
        return x ^ shifted(x, 31)

    state = mixed(seeds + signed(0x9E3779B97F4A7C15))
    state = mixed(state ^ ((positions + 1) * signed(0xD1342543DE82EF95)))
    return shifted(state, 11).double() * 2.0**-53


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    greedy: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = torch.log_softmax(logits.float() / temperatures[:, None], dim=-1)
    cumulative = logprobs.double().exp().cumsum(-1)
    goal = (uniforms(seeds, positions) * cumulative[:, -1])[:, None]
    sampled = torch.searchsorted(cumulative, goal, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
    tokens = torch.where(greedy.bool(), logprobs.argmax(-1), sampled)
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)
