"""Attention over blocks equals attention over the sequences they hold, however it is grouped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import build
from engine_cases import tiny
from hypothesis import given
from hypothesis import strategies as st

from toolwise.engine.length_groups import chunk_order, group_chunks
from toolwise.engine.paged_attention import PagedContext, attend, supports_paged_attention
from toolwise.engine.runner import Runner
from toolwise.errors import ModelError

SIZE, HEAD = 4, 8


def attended(
    chunks: list[tuple[int, int]],
    heads: int,
    key_heads: int,
    *,
    fixed_shapes: bool,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
) -> tuple[Any, Any, list[Any]]:
    """The output of `attend` for (held, length) chunks, of SDPA over each whole sequence, and the groups."""
    torch.manual_seed(0)
    chunks = [chunks[i] for i in chunk_order(chunks)]
    total = sum(-(-(held + length) // SIZE) for held, length in chunks)
    shuffled = torch.randperm(total).tolist()
    keys, values = torch.zeros(total, SIZE, key_heads, HEAD), torch.zeros(total, SIZE, key_heads, HEAD)
    tables, slots, rows, expected = [], [], [], []
    strength = torch.randn(heads)
    for held, length in chunks:
        table = [shuffled.pop() for _ in range(-(-(held + length) // SIZE))]
        tables.append(table)
        places = torch.tensor([table[p // SIZE] * SIZE + p % SIZE for p in range(held + length)])
        k, v = torch.randn(held + length, key_heads, HEAD), torch.randn(held + length, key_heads, HEAD)
        q = torch.randn(length, heads, HEAD)
        keys.view(-1, key_heads, HEAD)[places[:held]] = k[:held]
        values.view(-1, key_heads, HEAD)[places[:held]] = v[:held]
        slots.append(places[held:])
        rows.append((q, k[held:], v[held:]))
        mask = torch.ones(length, held + length).tril(held).triu(-1 << 30 if window is None else held - window + 1)
        k, v = (x.repeat_interleave(heads // key_heads, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD**0.5
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(mask == 0, -torch.inf).exp()
        total = weights.sum(-1, keepdim=True) + (strength.exp()[:, None, None] if sinks else 0.0)
        expected.append(torch.einsum("hqk,khd->qhd", weights / total, v))
    groups = group_chunks(
        [held for held, _ in chunks],
        [length for _, length in chunks],
        tables,
        SIZE,
        queries_per_kv_head=heads // key_heads,
        dtype=torch.float32,
        fixed_shapes=fixed_shapes,
    )
    context = PagedContext([keys], [values], torch.cat(slots), groups=groups, windows=[window])
    q, k, v = (torch.cat(parts).transpose(0, 1)[None] for parts in zip(*rows, strict=True))
    more = {"softcap": softcap, "s_aux": strength if sinks else None}
    out, _ = attend(SimpleNamespace(layer_idx=0), q, k, v, None, toolwise_paged=context, **more)
    return out[0], torch.cat(expected), groups


@pytest.mark.parametrize("heads", [(4, 4), (6, 3), (4, 1)])
@pytest.mark.parametrize("fixed_shapes", [False, True])
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=9))
def test_every_piece_sees_its_own_past_and_nothing_else(
    heads: tuple[int, int], fixed_shapes: bool, chunks: list[tuple[int, int]]
) -> None:
    found, expected, groups = attended(chunks, *heads, fixed_shapes=fixed_shapes)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert sum(group.rows for group in groups) == len(chunks)


def test_requests_of_like_length_attend_in_one_call() -> None:
    _, _, groups = attended([(30 + i % 3, 1) for i in range(20)], 4, 2, fixed_shapes=False)
    assert len(groups) == 1


def test_very_different_lengths_are_kept_alike() -> None:
    _, _, groups = attended([(5, 1)] * 8 + [(900, 1)] * 8, 4, 2, fixed_shapes=False)
    assert [group.rows for group in groups] == [8, 8]
    assert [group.keys for group in groups] == [6, 901]


def test_one_token_is_never_padded_to_a_prompt() -> None:
    _, _, groups = attended([(8, 1)] * 3 + [(8, 2)] * 3 + [(0, 8)], 4, 2, fixed_shapes=False)
    assert groups[0].queries == 1
    assert groups[0].rows == 3


def test_rows_that_are_padding_get_zeros() -> None:
    groups = group_chunks([0], [2], [[0]], SIZE, queries_per_kv_head=1, dtype=torch.float32)
    context = PagedContext(
        [torch.zeros(1, SIZE, 2, HEAD)], [torch.zeros(1, SIZE, 2, HEAD)], torch.tensor([0, 1]), groups=groups
    )
    q, k, v = (torch.randn(1, 2, 5, HEAD) for _ in range(3))
    out, _ = attend(SimpleNamespace(layer_idx=0), q, k, v, None, toolwise_paged=context)
    assert out.shape == (1, 5, 2, HEAD)
    assert float(out[0, 2:].abs().sum()) == 0.0
    assert context.calls == 1


@pytest.mark.parametrize("odd", [{"window": 5}, {"softcap": 0.7}, {"sinks": True}, {"window": 3, "softcap": 0.7}])
@pytest.mark.parametrize("fixed_shapes", [False, True])
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=9))
def test_windows_soft_caps_and_sinks_are_those_of_each_sequence(
    odd: dict[str, Any], fixed_shapes: bool, chunks: list[tuple[int, int]]
) -> None:
    found, expected, _ = attended(chunks, 6, 3, fixed_shapes=fixed_shapes, **odd)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_a_position_bias_is_refused() -> None:
    states = torch.zeros(1, 1, 1, HEAD)
    context = PagedContext([], [], torch.zeros(0))
    with pytest.raises(ModelError, match="paged cache does not support"):
        attend(SimpleNamespace(layer_idx=0), states, states, states, None, toolwise_paged=context, position_bias=states)


def test_the_model_attends_in_its_own_way_while_an_engine_runs_it() -> None:
    model = tiny("llama")
    runner = Runner(model, 16)
    assert runner.trunk.config._attn_implementation == "toolwise_paged"
    assert model.config._attn_implementation == "sdpa"
    ids = torch.tensor([[1, 2, 3]])
    with pytest.raises(ModelError, match="paged cache"):
        runner.trunk(input_ids=ids, use_cache=False)
    model(input_ids=ids)


def test_which_models_can_be_run() -> None:
    assert all(supports_paged_attention(tiny(family)) for family in ("llama", "qwen2", "qwen3"))
    assert supports_paged_attention(tiny("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=0))
    assert not supports_paged_attention(build("bloom"))
    assert not supports_paged_attention(object())
