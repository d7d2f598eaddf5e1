"""Groups by common blocks, checked against all partitions of small batches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from toolwise.engine.shared_prefixes import PrefixGroup, prefix_groups


def test_a_prompt_that_some_share_is_worth_more_than_the_beginning_that_all_share() -> None:
    tables = [[0, 1, 2, 3, 10], [0, 1, 2, 3, 11], [0, 4, 5, 6, 12], [0, 4, 5, 6, 13]]
    assert prefix_groups(tables, [4] * 4) == [PrefixGroup((0, 1), 4), PrefixGroup((2, 3), 4)]


def test_a_long_beginning_that_all_share_is_kept_together() -> None:
    tables = [[0, 1, 2, 3, 10], [0, 1, 2, 3, 10], [0, 1, 2, 3, 12], [0, 1, 2, 3, 13]]
    assert prefix_groups(tables, [5] * 4) == [PrefixGroup((0, 1, 2, 3), 4)]


def test_who_shares_nothing_is_alone() -> None:
    assert prefix_groups([[0], [1], [2]], [1] * 3) == [PrefixGroup((i,), 0) for i in range(3)]
    assert prefix_groups([[0, 1], [0, 2]], [0, 0]) == [PrefixGroup((0,), 0), PrefixGroup((1,), 0)]
    assert prefix_groups([[3, 4]], [2]) == [PrefixGroup((0,), 0)]


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(0, 6)), max_size=7))
def test_every_row_is_in_one_group_and_has_its_blocks(rows: list[tuple[list[int], int]]) -> None:
    # A block number implies the blocks before it, as in the prefix tree.
    tables = [[hash(tuple(path[: i + 1])) for i in range(len(path))] for path, _ in rows]
    full = [min(n, len(path)) for path, n in rows]
    groups = prefix_groups(tables, full) if rows else []
    assert sorted(i for group in groups for i in group.members) == list(range(len(rows)))
    for group in groups:
        assert len({tuple(tables[i][: group.blocks]) for i in group.members}) == 1
        assert all(group.blocks <= full[i] for i in group.members) or len(group.members) == 1
