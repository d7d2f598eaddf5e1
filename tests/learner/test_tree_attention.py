"""Attention in parts, with a plain kernel instead of the GPU's, against full attention and its gradient."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from learner_cases import pack
from plain_attention import PlainKernel
from torch import Tensor

from toolwise.learner.packed_attention import Layout, attend
from toolwise.learner.row_trees import Segment
from toolwise.learner.tree_attention import FlashKernel, PartwiseAttention, attention_parts

SIZE = 8
TREES = {
    "one prompt": [Segment(0, 9), Segment(9, 13, ((0, 5),)), Segment(13, 14, ((0, 5),)), Segment(14, 20, ((0, 5),))],
    "two groups": [Segment(0, 6), Segment(6, 9, ((0, 4),)), Segment(9, 15), Segment(15, 18, ((9, 12),))],
    "deep": [
        Segment(0, 8),
        Segment(8, 12, ((0, 5),)),
        Segment(12, 15, ((0, 5), (8, 10))),
        Segment(15, 17, ((0, 5), (8, 10))),
        Segment(17, 19, ((0, 5), (8, 10), (15, 16))),
        Segment(19, 22, ((0, 2),)),
    ],
}
GROUPS = [[prompt] * 5 + [9, reply, reply] for prompt in (1, 2) for reply in (5, 6, 7)]
SYSTEM = [[8] * 40 + [prompt] * 3 + [reply, 9] for prompt in (1, 2) for reply in (5, 6, 7)]
FOREST = [[first, *row] for first in (3, 4) for row in SYSTEM] + [[7] * 6]


@dataclass(frozen=True)
class Tokens:
    ids: list[int]
    sampled: list[bool]


def states_of(count: int, heads: int, key_heads: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(count, heads, SIZE), (count, key_heads, SIZE), (count, key_heads, SIZE)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])
def test_parts_equal_full_attention_and_its_gradient(name: str, heads: tuple[int, int]) -> None:
    segments = TREES[name]
    states = states_of(segments[-1].stop, *heads)
    grad = torch.randn(segments[-1].stop, heads[0], SIZE, dtype=torch.float64)

    out = PartwiseAttention.apply(*states, attention_parts(segments, "cpu"), 0.3, PlainKernel())
    ours = torch.autograd.grad(out, states, grad)

    asked = [x.transpose(0, 1)[None] for x in states]
    whole = attend(None, *asked, None, toolwise_layout=Layout.of(segments, "cpu"), scaling=0.3)[0][0]
    theirs = torch.autograd.grad(whole, states, grad)

    torch.testing.assert_close(out, whole, rtol=1e-10, atol=1e-10)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rows", [GROUPS, SYSTEM, FOREST])
def test_parts_of_the_layout_by_node_equal_full_attention(rows: list[list[int]]) -> None:
    [packed] = pack([Tokens(row, [False] * 3 + [True] * (len(row) - 3)) for row in rows], 1000, nodes=True)
    states = states_of(packed.T, 4, 2)
    grad = torch.randn(packed.T, 4, SIZE, dtype=torch.float64)
    out = PartwiseAttention.apply(*states, attention_parts(packed.segments, "cpu"), 0.3, PlainKernel())
    asked = [x.transpose(0, 1)[None] for x in states]
    whole = attend(None, *asked, None, toolwise_layout=Layout.of(packed.segments, "cpu"), scaling=0.3)[0][0]
    torch.testing.assert_close(out, whole, rtol=1e-10, atol=1e-10)
    pairs = zip(torch.autograd.grad(out, states, grad), torch.autograd.grad(whole, states, grad), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_readers_of_one_path_share_one_sequence() -> None:
    own, shared = attention_parts(TREES["one prompt"], "cpu")
    assert own.cu_seqlens_q.tolist() == own.cu_seqlens_k.tolist() == [0, 9, 13, 14, 20]
    assert shared.cu_seqlens_q.tolist() == [0, 11]
    assert shared.cu_seqlens_k.tolist() == [0, 5]
    assert shared.unique_keys
    assert own.causal
    assert not shared.causal


def test_paths_that_overlap_are_added_up() -> None:
    assert not attention_parts(TREES["deep"], "cpu")[1].unique_keys


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("heads", [(4, 4), (9, 3)])
def test_the_kernel_of_a_gpu_agrees(heads: tuple[int, int]) -> None:
    segments = [Segment(0, 300), *(Segment(300 + 40 * i, 340 + 40 * i, ((0, 260),)) for i in range(5))]
    states = [
        torch.randn(500, n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in (heads[0], heads[1], heads[1])
    ]
    grad = torch.randn(500, heads[0], 64, device="cuda", dtype=torch.bfloat16)
    found = {}
    for kernel, kind in ((FlashKernel(), torch.bfloat16), (PlainKernel(), torch.float64)):
        own = [x.detach().to(kind).requires_grad_() for x in states]
        out = PartwiseAttention.apply(*own, attention_parts(segments, "cuda"), 0.125, kernel)
        found[kind] = [out, *torch.autograd.grad(out, own, grad.to(kind))]
    for one, other in zip(found[torch.bfloat16], found[torch.float64], strict=True):
        assert (one.double() - other).norm() / other.norm() < 0.01
