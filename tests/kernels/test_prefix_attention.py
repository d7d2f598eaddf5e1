"""Decoding over shared prefixes with new tokens, on a GPU, against plain torch."""

from __future__ import annotations

import pytest
import torch

from toolwise.kernels import kernel, torch_reference
from toolwise.kernels.new_tokens import NewTokens

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
HEADS, KEY_HEADS, SIZE, BLOCK = 6, 2, 64, 16
PREFIXES, PREFIX_LENGTHS = [[0, 1], [2, 0], [0, 0]], [32, 16, 0]
STARTS, MEMBERS = [0, 3, 4, 6], [4, 0, 2, 1, 3, 5]
TAILS = [1, 18, 7, 20, 16, 0]
"""Keys of each request with its new token; the last is done and only pads the step."""


def on_gpu(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("splits", [None, 1, 2])
@torch.inference_mode()
def test_queries_are_rotated_and_tokens_stored_on_the_way(norm: bool, splits: int | None) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(len(TAILS), HEADS + 2 * KEY_HEADS, SIZE, device="cuda")
    angles = torch.randn(2, len(TAILS), SIZE, device="cuda")
    weights = torch.randn(2, SIZE, device="cuda") if norm else (None, None)
    tables = [[5 + 2 * row, 6 + 2 * row] for row in range(len(TAILS))]
    slots = [tables[row][(n - 1) // BLOCK] * BLOCK + (n - 1) % BLOCK if n else -1 for row, n in enumerate(TAILS)]
    new = NewTokens(
        qkv[:, HEADS:-KEY_HEADS], qkv[:, -KEY_HEADS:], *angles, torch.tensor(slots, device="cuda"), *weights, 1e-6
    )
    caches = [torch.randn(20, BLOCK, KEY_HEADS, SIZE, device="cuda") for _ in range(2)]
    groups = (on_gpu(PREFIXES), on_gpu(PREFIX_LENGTHS), on_gpu(STARTS), on_gpu(MEMBERS), 3)
    found = []
    for way, options in (
        (kernel("shared_prefix_decode", "cuda"), {"tail_splits": splits}),
        (torch_reference.shared_prefix_decode, {}),
    ):
        own = [cache.clone() for cache in caches]
        out = way(qkv[:, :HEADS], *own, *groups, on_gpu(tables), on_gpu(TAILS), 0.125, new=new, **options)
        found.append((out[:-1], *own))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
