"""Chunks are grouped with little padding, or, for bitwise reproducibility, in shapes that depend only on the chunk."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from toolwise.engine.length_groups import Group, chunk_order, group_chunks

SIZE = 4


def grouped(chunks: list[tuple[int, int]], **more: Any) -> list[Group]:
    chunks = [chunks[i] for i in chunk_order(chunks)]
    tables = [list(range(-(-sum(piece) // SIZE))) for piece in chunks]
    held, lengths = [a for a, _ in chunks], [b for _, b in chunks]
    return group_chunks(held, lengths, tables, SIZE, queries_per_kv_head=2, dtype=torch.float32, **more)


some = st.lists(st.tuples(st.integers(0, 3000), st.sampled_from([1, 1, 1, 2, 5, 30])), min_size=1, max_size=40)


@given(some, st.booleans())
def test_every_piece_is_in_one_group_and_groups_are_stretches(
    chunks: list[tuple[int, int]], fixed_shapes: bool
) -> None:
    groups = grouped(chunks, fixed_shapes=fixed_shapes)
    assert sum(g.rows for g in groups) == len(chunks)
    assert [g.tokens.start for g in groups] == [0, *(g.tokens.stop for g in groups[:-1])]
    assert groups[-1].tokens.stop == sum(length for _, length in chunks)


@given(some)
def test_little_is_padding(chunks: list[tuple[int, int]]) -> None:
    groups = grouped(chunks)
    padded = sum(g.rows * g.keys * g.queries for g in groups)
    wanted = sum((held + length) * length for held, length in chunks)
    assert padded <= 2.2 * wanted + 30 * 512 * len(groups)
    assert all(g.queries == 1 or g.tokens.stop - g.tokens.start >= g.rows * g.queries / 1.6 for g in groups)


@given(some, st.integers(1, 5000))
def test_no_group_gathers_more_than_it_may(chunks: list[tuple[int, int]], most: int) -> None:
    assert all(g.rows == 1 or g.rows * g.keys <= most for g in grouped(chunks, max_keys=most))


@given(some, st.tuples(st.integers(0, 3000), st.sampled_from([1, 2, 5])))
def test_alike_means_that_company_changes_no_shape(chunks: list[tuple[int, int]], mine: tuple[int, int]) -> None:
    [alone] = grouped([mine], fixed_shapes=True)
    shapes = {(g.queries, g.keys, g.causal, g.mask is None) for g in grouped([*chunks, mine], fixed_shapes=True)}
    assert (alone.queries, alone.keys, alone.causal, alone.mask is None) in shapes
