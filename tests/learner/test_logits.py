"""Log-probs and entropies over a vocabulary, and their gradients by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from toolwise.learner.logits import Drawn, InOnePass, drawn

WAYS = pytest.mark.parametrize("way", [Drawn, InOnePass])
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
def test_half_precision_logits_are_judged_in_single(way: Any) -> None:
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_say_what_plain_torch_says(dtype: torch.dtype) -> None:
    logits = (4 * torch.randn(300, 50_001, device="cuda")).to(dtype)
    of, targets = torch.arange(600, device="cuda") // 2, torch.randint(0, 50_001, (600,), device="cuda")
    weights = torch.randn(2, 600, device="cuda", dtype=torch.float64)
    found = []
    for way, given in ((drawn, logits.clone()), (Drawn.apply, logits.double())):
        given.requires_grad_()
        logprobs, entropy = way(given, of, targets, 0.7)
        (weights[0] * logprobs + weights[1] * entropy).sum().backward()
        assert given.grad is not None
        found.append((logprobs.double(), entropy.double(), given.grad.double()))
    near = 1e-5 if dtype == torch.float32 else 1e-2
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=near, atol=near)
