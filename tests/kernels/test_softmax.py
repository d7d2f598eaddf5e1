"""Log-sum-exp and entropy with their gradient, against autograd in fp64; on a GPU the kernel against plain torch."""

from __future__ import annotations

import pytest
import torch

from toolwise.kernels import kernel, torch_reference

OF, TARGETS = torch.tensor([0, 0, 2, 2, 2]), torch.tensor([4, 4, 0, 1, 6])
"""One row drew the same token twice, one drew none."""


def rows(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    found = 3 * torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found[1, 2] = -torch.inf
    return found.to(dtype)


def test_sums_and_gradient_are_those_of_autograd() -> None:
    logits, scale = rows().requires_grad_(), 1.4
    a, b = torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    lse, entropy = torch_reference.softmax_sums(logits.detach(), scale)
    logp = torch.log_softmax(scale * logits, -1)
    torch.testing.assert_close(lse, torch.logsumexp(scale * logits.detach(), -1))
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=scale * logits.detach()).entropy())
    own = -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0.0)).sum(-1)
    (wanted,) = torch.autograd.grad((a * logp[OF, TARGETS] + b * own[OF]).sum(), logits)
    found = torch_reference.softmax_sums_backward(logits.detach(), scale, lse, entropy, OF, TARGETS, a, b)
    torch.testing.assert_close(scale * found, wanted)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_agrees_with_plain_torch(dtype: torch.dtype) -> None:
    logits, of, targets = rows(dtype).cuda(), OF.cuda(), TARGETS.cuda()
    a, b = torch.randn(2, 5, device="cuda")
    sums = torch_reference.softmax_sums(logits, 1.4)
    for ours, theirs in zip(kernel("softmax_sums", "cuda")(logits, 1.4), sums, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    given = (logits, 1.4, *sums, of, targets, a, b)
    ours, theirs = (f(*given) for f in (kernel("softmax_sums_backward", "cuda"), torch_reference.softmax_sums_backward))
    torch.testing.assert_close(ours, theirs, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
