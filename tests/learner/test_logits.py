"""Log-probs and entropies over a vocabulary, and their gradients by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from toolwise.learner.logits import FusedLogprobEntropy, LogprobEntropy, logprobs_and_entropy

WAYS = pytest.mark.parametrize("way", [LogprobEntropy, FusedLogprobEntropy])
"""The second's kernels are plain torch where there is no GPU."""
OF, TARGETS = torch.tensor([0, 0, 1, 3, 3]), torch.tensor([2, 2, 0, 1, 4])


def by_autograd(logits: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    logp = torch.log_softmax(logits / temperature, -1)
    return logp[OF, TARGETS], -(logp.exp() * logp).sum(-1)[OF]


@WAYS
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (0.7, -0.3)])
def test_values_and_gradients_are_those_of_autograd(temperature: float, weights: tuple[float, float], way: Any) -> None:
    logits = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    each = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.1], dtype=torch.float64)

    def gradient(found: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        terms = [w * (each * part).sum() for w, part in zip(weights, found, strict=True) if w]
        return torch.autograd.grad(torch.stack(terms).sum(), logits)[0]

    ours, theirs = way.apply(logits, OF, TARGETS, temperature), by_autograd(logits, temperature)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(gradient(ours), gradient(theirs))


@WAYS
def test_half_precision_logits_are_computed_in_single_precision(way: Any) -> None:
    logits = torch.randn(4, 6).bfloat16().requires_grad_()
    logprobs, entropy = way.apply(logits, OF, TARGETS, 1.0)
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert torch.autograd.grad(logprobs.sum(), logits)[0].dtype == torch.bfloat16


@WAYS
def test_certainty_is_finite(way: Any) -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4]]).requires_grad_()
    logprobs, entropy = way.apply(logits, torch.tensor([0]), torch.tensor([0]), 1.0)
    assert (logprobs.item(), entropy.item()) == (0.0, 0.0)
    assert torch.autograd.grad(logprobs.sum() + entropy.sum(), logits)[0].isfinite().all()


@WAYS
@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.99, 0.999, 0.9999])
def test_the_gradient_of_a_confident_token_survives_half_precision(way: Any, confidence: float) -> None:
    """At the sampled token the gradient is 1 − p: rounded once, not the difference of two rounded numbers."""
    rest = torch.log(torch.tensor((1 - confidence) / 7))
    logits = torch.cat([torch.log(torch.tensor([confidence])), rest.expand(7)])[None].bfloat16()
    exact = torch.log_softmax(logits.double(), -1)[0]
    logits.requires_grad_()
    twice = torch.tensor([0, 0])  # two rollouts sampled the same token
    logprobs, _ = way.apply(logits, twice, twice, 1.0)
    [grad] = torch.autograd.grad(logprobs.sum(), logits)
    wanted = -2 * exact.exp()
    wanted[0] += 2
    torch.testing.assert_close(grad[0].double(), wanted, rtol=2e-2, atol=1e-9)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("peak", [0.0, 8.0, 16.0])
def test_the_kernels_agree_with_plain_torch(dtype: torch.dtype, peak: float) -> None:
    """Rows of 50,001 logits whose sampled tokens range from very unlikely to nearly certain."""
    of = torch.arange(600, device="cuda") // 2
    targets = torch.randint(0, 50_001, (600,), device="cuda")
    targets[1::4] = targets[::4]  # some rows have the same target twice
    logits = torch.randn(300, 50_001, device="cuda")
    logits[of, targets] += peak
    logits = logits.to(dtype)
    weights = torch.randn(2, 600, device="cuda", dtype=torch.float64)
    found = []
    for way, given in ((logprobs_and_entropy, logits.clone()), (LogprobEntropy.apply, logits.double())):
        given.requires_grad_()
        logprobs, entropy = way(given, of, targets, 0.7)
        (weights[0] * logprobs + weights[1] * entropy).sum().backward()
        assert given.grad is not None
        found.append((logprobs.double(), entropy.double(), given.grad.double()))
    (logprobs, entropy, grad), (exact, its_entropy, its_grad) = found
    torch.testing.assert_close(logprobs, exact, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropy, its_entropy, rtol=1e-4, atol=1e-4)
    near = 1e-4 if dtype == torch.float32 else 2e-2
    assert float((grad - its_grad).norm() / its_grad.norm()) < near
    # 1 − p of a nearly certain token is what the rounding of x and of its log-sum-exp, two numbers in fp32, leaves.
    rounding = 2 * torch.finfo(torch.float32).eps * float(logits.abs().max() / 0.7) * 2 * float(weights.abs().max())
    torch.testing.assert_close(grad[of, targets], its_grad[of, targets], rtol=near, atol=rounding)
