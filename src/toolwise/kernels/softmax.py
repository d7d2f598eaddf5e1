"""Log-sum-exp and entropy of each row of logits, and their gradient: logits are read once and never copied to fp32.

x = scale · logits;  lse = log Σ exp x;  log p = x − lse;  H = − Σ p log p
backward: − p (a + b (log p + H)) + Σ a_t at t, the gradient of Σ a_t log p_t + b · H with respect to x; a = Σ a_t
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,import-not-found,import-untyped"
# ruff: noqa: N803  (capitals are compile-time constants)
from __future__ import annotations

import torch
import triton
import triton.language as tl

from toolwise.kernels.launch import jit

TILE = 4096


@jit
def _softmax_sums(logits, lse, entropy, stride, scale, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Program (row): online sums relative to the running maximum of x, rescaled when it changes."""
    row = tl.program_id(0).to(tl.int64)
    top = float("-inf")
    total = 0.0
    weighted = 0.0
    for start in range(0, VOCAB, TILE):
        at = start + tl.arange(0, TILE)
        x = tl.load(logits + row * stride + at, mask=at < VOCAB, other=float("-inf")).to(tl.float32) * scale
        largest = tl.maximum(top, tl.max(x, 0))
        base = tl.where(largest == float("-inf"), 0.0, largest)
        moved = tl.where(top == float("-inf"), 0.0, top - base)
        shrunk = tl.where(top == float("-inf"), 0.0, tl.exp(top - base))
        away = tl.where(x == float("-inf"), 0.0, x - base)
        part = tl.where(x == float("-inf"), 0.0, tl.exp(away))
        weighted = shrunk * (weighted + moved * total) + tl.sum(part * away, 0)
        total = shrunk * total + tl.sum(part, 0)
        top = largest
    tl.store(lse + row, top + tl.log(total))
    tl.store(entropy + row, tl.log(total) - weighted / total)


@jit
def _softmax_sums_backward(
    logits, lse, entropy, row_grad_logprob, row_grad_entropy, starts, targets, weights, grad, stride, scale,
    VOCAB: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (row, tile). Gradients of sampled tokens are added before rounding, since 1 − p may be small."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row * stride + at, mask=at < VOCAB, other=float("-inf"))
    logp = x.to(tl.float32) * scale - tl.load(lse + row)
    p = tl.exp(logp)
    surprise = tl.where(p == 0.0, 0.0, logp + tl.load(entropy + row))
    found = -p * (tl.load(row_grad_logprob + row) + tl.load(row_grad_entropy + row) * surprise)
    for token in range(tl.load(starts + row), tl.load(starts + row + 1)):
        found += tl.where(at == tl.load(targets + token), tl.load(weights + token), 0.0)
    tl.store(grad + row * VOCAB + at, found.to(x.dtype), mask=at < VOCAB)


def softmax_sums(logits: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(lse [N], entropy [N]) in fp32, for logits [N, V]."""
    rows, vocabulary = logits.shape
    lse, entropy = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    if rows:
        with torch.cuda.device_of(logits):  # Triton launches on the current device
            _softmax_sums[(rows,)](logits, lse, entropy, logits.stride(0), scale, vocabulary, TILE, num_warps=8)
    return lse, entropy


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
    """Gradient [N, V] in the dtype of the logits. `row_index`, ascending, is the row of each sampled token."""
    rows, vocabulary = logits.shape
    grad = torch.empty(rows, vocabulary, dtype=logits.dtype, device=logits.device)
    if not rows:
        return grad
    by_row = [
        torch.zeros_like(lse).index_add_(0, row_index, part.to(lse.dtype)) for part in (grad_logprob, grad_entropy)
    ]
    starts = torch.searchsorted(row_index.contiguous(), torch.arange(rows + 1, device=row_index.device))
    weights = grad_logprob.to(lse.dtype).contiguous()
    with torch.cuda.device_of(logits):
        _softmax_sums_backward[(rows, triton.cdiv(vocabulary, TILE))](
            logits, lse, entropy, *by_row, starts, targets.contiguous(), weights, grad, logits.stride(0), scale,
            vocabulary, TILE, num_warps=8,
        )  # fmt: skip
    return grad
