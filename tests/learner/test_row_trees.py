"""The layout by node: rows are split where they diverge, and readers of a node are adjacent in simple trees."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolwise.learner.row_trees import MIN_LEVEL_SAVING, Array, FlatTree, layout_by_node, layout_by_row, reduce_sharing
from toolwise.learner.tree_attention import attention_parts

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=9)


def ordered(rows: list[list[int]]) -> tuple[list[Array], list[int]]:
    """Rows in lexicographic order, and how many tokens each shares with the one before it."""

    def common(a: list[int], b: list[int]) -> int:
        return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    rows = sorted(rows)
    return [np.array(row) for row in rows], [0, *(common(a, b) for a, b in pairwise(rows))]


def spans(laid: FlatTree) -> list[tuple[int, int]]:
    return [(segment.start, segment.stop) for segment in laid.segments]


@given(ROWS)
def test_each_row_is_complete_and_no_token_is_duplicated(rows: list[list[int]]) -> None:
    arrays, shared = ordered(rows)
    laid = layout_by_node(arrays, shared)
    if laid is None:
        return
    for ids, row_indices in zip(arrays, laid.row_indices, strict=True):
        assert laid.ids[row_indices].tolist() == ids.tolist()
        assert laid.positions[row_indices].tolist() == list(range(len(ids)))
    assert len(laid.ids) == len(layout_by_row(arrays, shared).ids)
    assert [stop for _, stop in spans(laid)][:-1] == [start for start, _ in spans(laid)][1:]


@given(ROWS)
def test_readers_of_a_segment_read_all_of_it_and_are_adjacent(rows: list[list[int]]) -> None:
    laid = layout_by_node(*ordered(rows))
    if laid is None:
        return
    assert {span for segment in laid.segments for span in segment.path} <= set(spans(laid))
    assert all(part.unique_keys for part in attention_parts(laid.segments, "cpu")[1:])


def test_prompts_come_before_all_replies_so_nothing_is_gathered() -> None:
    rows = [[1, 1, 1, 5, 5], [1, 1, 1, 6], [1, 1, 1, 7, 7], [2, 2, 5], [2, 2, 6], [3, 3, 3]]
    laid = layout_by_node(*ordered(rows))
    assert laid is not None
    assert laid.ids.tolist() == [1, 1, 1, 2, 2, 3, 3, 3, 5, 5, 6, 7, 7, 5, 6]
    _, shared = attention_parts(laid.segments, "cpu")
    assert (shared.keys, shared.queries) == (slice(0, 5), slice(8, 15))
    assert shared.cu_seqlens_k.tolist() == [0, 3, 5]
    assert shared.cu_seqlens_q.tolist() == [0, 5, 7]


def test_a_system_prompt_prompts_and_replies_need_no_gathering() -> None:
    rows = [[9, 9, *prompt, reply] for prompt in ([1, 1], [2, 2]) for reply in (5, 6, 7)]
    laid = layout_by_node(*ordered(rows))
    assert laid is not None
    assert laid.ids.tolist() == [9, 9, 1, 1, 2, 2, 5, 6, 7, 5, 6, 7]
    _, system, prompts = attention_parts(laid.segments, "cpu")
    assert (system.keys, system.queries) == (slice(0, 2), slice(2, 12))
    assert (prompts.keys, prompts.queries) == (slice(2, 6), slice(6, 12))


def test_two_such_trees() -> None:
    rows = [[first, first, *prompt, reply] for first in (8, 9) for prompt in ([1, 1], [2, 2]) for reply in (5, 6)]
    laid = layout_by_node(*ordered(rows))
    assert laid is not None
    assert laid.ids.tolist() == [8, 8, 1, 1, 5, 6, 2, 2, 5, 6, 9, 9, 1, 1, 5, 6, 2, 2, 5, 6]


def test_a_deep_tree_is_left_as_it_is() -> None:
    chain = [[1] * depth + [2] for depth in range(1, 7)]
    assert layout_by_node(*ordered(chain)) is None


@pytest.mark.parametrize(
    ("shared", "wanted"),
    [
        ([0, 1024, 1027, 1024, 1055], [0, 1024, 1024, 1024, 1024]),
        ([0, 1027, 1024], [0, 1024, 1024]),
        ([0, 600, 1000, 1003, 600, 900, 910], [0, 600, 1000, 1000, 600, 900, 900]),
        ([0, 1024, 1056], [0, 1024, 1056]),
        ([0, 5, 0, 7], [0, 5, 0, 7]),
    ],
)
def test_short_branches_are_dropped(shared: list[int], wanted: list[int]) -> None:
    assert reduce_sharing(np.array(shared), np.full(len(shared), 1060)).tolist() == wanted


def groups(system: int, prompt: int, reply: int, count: int = 10, size: int = 4) -> tuple[list[int], list[int]]:
    """Shared lengths and row lengths when all prompts begin with the same tokens."""
    shared = [0, *([prompt] * (size - 1) + [system]) * count][:-1]
    return shared, [prompt + reply] * (count * size)


def test_a_short_system_prompt_is_computed_for_each_group() -> None:
    shared, lengths = groups(system=100, prompt=1000, reply=200)
    found = reduce_sharing(np.array(shared), np.array(lengths))
    assert found.tolist() == [0 if common == 100 else common for common in shared]


def test_a_long_system_prompt_is_computed_once() -> None:
    shared, lengths = groups(system=600, prompt=1000, reply=200)
    assert reduce_sharing(np.array(shared), np.array(lengths)).tolist() == shared


def test_a_level_below_a_kept_one_may_be_dropped() -> None:
    inner, lengths = groups(system=4100, prompt=5000, reply=500, count=3)
    shared = [*inner, 4000, *inner[1:]]
    found = reduce_sharing(np.array(shared), np.array(lengths * 2))
    assert found.tolist() == [4000 if common == 4100 else common for common in shared]


@given(st.lists(st.integers(0, 200), max_size=30), st.integers(1, 90))
def test_the_extra_tokens_are_bounded(shared: list[int], own: int) -> None:
    shared[:1] = [0] * len(shared[:1])
    before, lengths = np.array(shared, dtype=np.int64), np.array(shared, dtype=np.int64) + own
    after = reduce_sharing(before, lengths)
    assert (lengths - after).sum() <= (1 + MIN_LEVEL_SAVING) * (lengths - before).sum()


def test_a_chain_of_turns_keeps_sharing() -> None:
    """Each level is small compared with what is below; dropping all of them would compute everything many times."""
    turns = np.arange(20)
    shared, lengths = 200 * turns, 200 * (turns + 1) + 50
    assert reduce_sharing(shared, lengths).tolist() == shared.tolist()


@given(st.lists(st.integers(0, 200), max_size=30))
def test_sharing_is_never_increased(shared: list[int]) -> None:
    shared[:1] = [0] * len(shared[:1])
    found = reduce_sharing(np.array(shared, dtype=np.int64), np.full(len(shared), 201)).tolist()
    assert all(after <= before for before, after in zip(shared, found, strict=True))


def test_rows_that_all_share_a_prompt_keep_it_however_short() -> None:
    assert reduce_sharing(np.array([0, 5, 5, 5]), np.full(4, 900)).tolist() == [0, 5, 5, 5]
