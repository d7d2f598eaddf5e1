"""Per-head kernels of the learner, one pass over memory each.

rotate: (x₁, x₂) → (x₁ c₁ − x₂ s₁, x₂ c₂ + x₁ s₂), rotate-half rope of each head; or its transpose
merge:  o ← o · exp(l − L) + o' · exp(l' − L), l ← L = log(exp l + exp l'): merge attention over two sets of keys
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,import-not-found,import-untyped"
# ruff: noqa: N803  (capitals are compile-time constants)
from __future__ import annotations

import torch
import triton
import triton.language as tl

from toolwise.kernels.launch import jit


@jit
def _rotate(
    x, cos, sin, out, token_stride, head_stride, out_token_stride, out_head_stride, angle_stride,
    HEADS: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr, WIDE: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Program (token): all heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head, at = tl.arange(0, PADDED)[:, None], tl.arange(0, WIDE)[None, :]
    inside = (head < HEADS) & (at < HALF)
    here = x + token * token_stride + head * head_stride + at
    first = tl.load(here, mask=inside, other=0.0)
    second = tl.load(here + HALF, mask=inside, other=0.0)
    dtype = first.dtype
    angle = token * angle_stride + at
    c1 = tl.load(cos + angle, mask=at < HALF, other=0.0).to(tl.float32)
    c2 = tl.load(cos + angle + HALF, mask=at < HALF, other=0.0).to(tl.float32)
    s1 = tl.load(sin + angle, mask=at < HALF, other=0.0).to(tl.float32)
    s2 = tl.load(sin + angle + HALF, mask=at < HALF, other=0.0).to(tl.float32)
    first, second = first.to(tl.float32), second.to(tl.float32)
    if BACK:
        turned, other = first * c1 + second * s2, second * c2 - first * s1
    else:
        turned, other = first * c1 - second * s1, second * c2 + first * s2
    there = out + token * out_token_stride + head * out_head_stride + at
    tl.store(there, turned.to(dtype), mask=inside)
    tl.store(there + HALF, other.to(dtype), mask=inside)


@jit
def _merge(
    out, lse, new_out, new_lse, token_index, tokens, queries,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, WIDE: tl.constexpr, SIDE_BY_SIDE: tl.constexpr,
):  # fmt: skip
    """Program (query): all heads of one query token. SIDE_BY_SIDE: `token_index` is the first of contiguous tokens."""
    query = tl.program_id(0).to(tl.int64)
    token = token_index + query if SIDE_BY_SIDE else tl.load(token_index + query)
    head = tl.arange(0, PADDED)
    real = head < HEADS
    before = tl.load(lse + head * tokens + token, mask=real, other=0.0)
    new = tl.load(new_lse + head * queries + query, mask=real, other=0.0)
    top = tl.maximum(before, new)
    whole = top + tl.log(tl.exp(before - top) + tl.exp(new - top))
    at = tl.arange(0, WIDE)[None, :]
    inside = real[:, None] & (at < SIZE)
    old = out + (token * HEADS + head[:, None]) * SIZE + at
    kept = tl.load(old, mask=inside, other=0.0)
    added = tl.load(new_out + (query * HEADS + head[:, None]) * SIZE + at, mask=inside, other=0.0)
    found = kept.to(tl.float32) * tl.exp(before - whole)[:, None] + added.to(tl.float32) * tl.exp(new - whole)[:, None]
    tl.store(old, found.to(kept.dtype), mask=inside)
    tl.store(lse + head * tokens + token, whole, mask=real)


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, back: bool = False, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x [T, H, D], contiguous in its last dimension; cos and sin [T, D]. Returns a contiguous [T, H, D], or `out`,
    which may be x itself."""
    tokens, heads, size = x.shape
    assert size % 2 == 0, "the head size must be even"
    assert x.stride(2) == cos.stride(1) == sin.stride(1) == 1, "the last dimension must be contiguous"
    assert cos.stride(0) == sin.stride(0), "cos and sin must have the same stride"
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    assert out.stride(2) == 1, "the last dimension must be contiguous"
    if tokens:
        with torch.cuda.device_of(x):  # Triton launches on the current device
            _rotate[(tokens,)](
                x, cos, sin, out, x.stride(0), x.stride(1), out.stride(0), out.stride(1), cos.stride(0),
                heads, size // 2, triton.next_power_of_2(heads), triton.next_power_of_2(size // 2), back, num_warps=4,
            )  # fmt: skip
    return out


def merge(
    out: torch.Tensor,
    lse: torch.Tensor,
    new_out: torch.Tensor,
    new_lse: torch.Tensor,
    token_index: torch.Tensor | slice,
) -> None:
    """Merge new_out [Q, H, D] with new_lse [H, Q] into out [T, H, D] and lse [H, T] at `token_index` [Q], which has no
    duplicates. All tensors are contiguous; sums are in fp32."""
    tokens, heads, size = out.shape
    where = token_index.start if isinstance(token_index, slice) else token_index.contiguous()
    assert all(t.is_contiguous() for t in (out, lse, new_out, new_lse)), "all tensors must be contiguous"
    queries = new_out.shape[0]
    if queries:
        with torch.cuda.device_of(out):
            _merge[(queries,)](
                out, lse, new_out, new_lse, where, tokens, queries, heads, size,
                triton.next_power_of_2(heads), triton.next_power_of_2(size), isinstance(token_index, slice),
                num_warps=4,
            )  # fmt: skip
