"""New tokens of a decode step: the same result as rotating and storing them first."""

from __future__ import annotations

import pytest
import torch

from toolwise.kernels import torch_reference
from toolwise.kernels.new_tokens import NewTokens

HEADS, KEY_HEADS, SIZE, BLOCK = 4, 2, 8, 4
LENGTHS = [3, 6, 1]
TABLES = torch.tensor([[0, 1], [2, 3], [4, 5]], dtype=torch.int32)


@pytest.mark.parametrize("norm", [False, True])
def test_attention_rotates_and_stores_them_first(norm: bool) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(len(LENGTHS), HEADS + 2 * KEY_HEADS, SIZE, dtype=torch.float64)
    cos, sin = torch.randn(2, len(LENGTHS), SIZE, dtype=torch.float64)
    weights = tuple(torch.randn(2, SIZE, dtype=torch.float64)) if norm else (None, None)
    places = [(int(table[(n - 1) // BLOCK]), (n - 1) % BLOCK) for table, n in zip(TABLES, LENGTHS, strict=True)]
    slots = torch.tensor([block * BLOCK + place for block, place in places])
    caches = [torch.randn(6, BLOCK, KEY_HEADS, SIZE, dtype=torch.float64) for _ in range(2)]
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    before = qkv.clone()

    ours = [cache.clone() for cache in caches]
    q, k, v = qkv.split([HEADS, KEY_HEADS, KEY_HEADS], dim=1)
    new = NewTokens(k, v, cos, sin, slots, *weights, 1e-6)
    found = torch_reference.paged_attention_decode(q, *ours, TABLES, lengths, 0.3, new=new)
    torch.testing.assert_close(qkv, before, rtol=0, atol=0)  # the inputs are not modified

    theirs = [cache.clone() for cache in caches]
    torch_reference.rope_and_store(
        q, k, v, cos, sin, *theirs, slots, q_weight=weights[0], k_weight=weights[1], eps=1e-6
    )
    torch.testing.assert_close(found, torch_reference.paged_attention_decode(q, *theirs, TABLES, lengths, 0.3))
    for one, other, old in zip(ours, theirs, caches, strict=True):
        torch.testing.assert_close(one, other)
        changed = (one != old).any(-1).any(-1).nonzero().tolist()
        assert sorted(map(tuple, changed)) == sorted(places)
