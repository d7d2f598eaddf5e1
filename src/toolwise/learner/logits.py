"""From logits to log-probs: the log-prob and entropy of sampled tokens.

Works on one chunk of tokens at a time; `forward` splits the chunks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from toolwise.kernels import available, kernel


def logprobs_and_entropy(
    logits: Tensor, row_index: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target under row `row_index` of the logits, and that row's entropy; after temperature, in fp32.
    `row_index` must be ascending."""
    function = FusedLogprobEntropy if available(logits.device) else LogprobEntropy
    result: tuple[Tensor, Tensor] = function.apply(logits, row_index, targets, temperature)  # type: ignore[no-untyped-call]
    return result


class LogprobEntropy(torch.autograd.Function):
    """With x = logits / temperature, log p = log_softmax(x) and H = − Σ p log p:

        ∂ log p_t / ∂x = 1[t] − p        ∂H / ∂x = − p (log p + H)

    Written by hand because autograd would store and compute several times as much over the whole vocabulary.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, row_index: Tensor, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        x = logits.float() if logits.dtype.itemsize < 4 else logits
        logp = torch.log_softmax(x if temperature == 1.0 else x / temperature, dim=-1)
        p = logp.exp()
        entropy = -torch.linalg.vecdot(p, logp)
        ctx.save_for_backward(p, entropy, row_index, targets)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        ctx.set_materialize_grads(False)
        return logp[row_index, targets], entropy[row_index]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        p, entropy, row_index, targets = ctx.saved_tensors
        grad_logprob, grad_entropy = (None if g is None else g / ctx.temperature for g in grads)
        if grad_logprob is None and grad_entropy is None:
            return None, None, None, None
        row_grad_logprob = _sum_by_row(grad_logprob, row_index, entropy)
        if grad_entropy is None:
            grad = p * -row_grad_logprob[:, None]
        else:
            row_grad_entropy = _sum_by_row(grad_entropy, row_index, entropy)
            logp = p.clamp(min=torch.finfo(p.dtype).tiny).log_()  # p = 0 adds nothing
            grad = (
                (logp + entropy[:, None]).mul_(row_grad_entropy[:, None]).add_(row_grad_logprob[:, None]).neg_().mul_(p)
            )
        if grad_logprob is not None:
            grad.index_put_((row_index, targets), grad_logprob, accumulate=True)
        return grad.to(ctx.dtype), None, None, None


class FusedLogprobEntropy(torch.autograd.Function):
    """The same with fused kernels that read the logits in their own dtype: no [rows, vocabulary] tensor in fp32."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, row_index: Tensor, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        logits = logits.contiguous()
        lse, entropy = kernel("softmax_sums", logits.device)(logits, 1.0 / temperature)
        ctx.save_for_backward(logits, lse, entropy, row_index, targets)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logits[row_index, targets].to(lse.dtype) / temperature - lse[row_index], entropy[row_index]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        logits, lse, entropy, row_index, targets = ctx.saved_tensors
        if all(grad is None for grad in grads):
            return None, None, None, None
        token_grads = (
            torch.zeros_like(entropy[row_index]) if grad is None else grad / ctx.temperature for grad in grads
        )
        backward = kernel("softmax_sums_backward", logits.device)
        return backward(logits, 1.0 / ctx.temperature, lse, entropy, row_index, targets, *token_grads), None, None, None


def _sum_by_row(grad: Tensor | None, row_index: Tensor, like: Tensor) -> Tensor:
    """Sum the gradients of the tokens sampled from each row."""
    sums = torch.zeros_like(like)
    return sums if grad is None else sums.index_add_(0, row_index, grad)
