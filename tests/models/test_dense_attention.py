"""Attention in explicit steps equals torch's fused attention where that applies, and the formula where it does not."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from toolwise.models.dense_attention import dense_attention


def states(seed: int = 0, *, value_size: int = 8) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(seed)
    sizes = ((2, 6, 5, 8), (2, 3, 7, 8), (2, 3, 7, value_size))
    return tuple(torch.randn(size, generator=draw, dtype=torch.float64) for size in sizes)


@pytest.mark.parametrize("value_size", [8, 5])
def test_plain_attention_is_that_of_torch(value_size: int) -> None:
    q, k, v = states(value_size=value_size)
    mask = torch.zeros(5, 7, dtype=torch.float64).masked_fill_(torch.ones(5, 7).triu(3).bool(), -torch.inf)
    expected = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(dense_attention(q, k, v, mask, scale=0.3), expected)


def test_a_soft_cap_bounds_the_scores() -> None:
    q, k, v = states()
    k6, v6 = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = 1.5 * torch.tanh(q @ k6.transpose(-1, -2) * 0.3 / 1.5)
    torch.testing.assert_close(dense_attention(q, k, v, None, scale=0.3, softcap=1.5), scores.softmax(-1) @ v6)


def test_a_sink_takes_weight_and_gives_no_value() -> None:
    q, k, v = states()
    sinks = torch.linspace(-2, 3, 6, dtype=torch.float64)
    zero = torch.zeros(2, 6, 1, 8, dtype=torch.float64)
    k6, v6 = (torch.cat([x.repeat_interleave(2, 1), zero], 2) for x in (k, v))
    scores = q @ k6.transpose(-1, -2) * 0.3
    scores[..., -1] = sinks[:, None]
    torch.testing.assert_close(dense_attention(q, k, v, None, scale=0.3, sinks=sinks), scores.softmax(-1) @ v6)


def test_half_precision_has_its_softmax_in_fp32() -> None:
    q, k, v = (x.bfloat16() for x in states())
    found = dense_attention(q, k, v, None, scale=0.3, softcap=50.0)
    exact = dense_attention(q.double(), k.double(), v.double(), None, scale=0.3, softcap=50.0)
    assert found.dtype == torch.bfloat16
    assert float((found.double() - exact).abs().max()) < 0.03
